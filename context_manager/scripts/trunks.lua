-- Put behind bytes.lua: segments that contexts of one tenant and shard share (ADR 0098).
--
-- A trunk is a list: its head, then segments, which never change. A transcript is the leading segments of its row's
-- trunks, in their order, and then its own list. A row's field `trunks` is `name:segments:tokens` again and again.
-- The head is `bytes@hour`, what the ledger counts and until when, then ` segments:users:tokens` for each number of
-- leading segments that rows use. The longest use decides how long the trunk is; without a user it is deleted.
-- Names of trunks are in rows, so they are not among KEYS; they lie in the same slot.

local function trunk_key(transcript, name)
  local tag, tenant = string.match(transcript, '^(cc:{s%d+}):transcript:([^:]+):')
  return tag .. ':trunk:' .. tenant .. ':' .. name
end

-- Returns a row's trunks as {{name, segments, tokens}, ...}, and the segments and tokens of all.
local function read_trunks(row)
  local trunks, segments, tokens = {}, 0, 0
  for name, some, theirs in string.gmatch(row.trunks or '', '([^ :]+):(%d+):(%d+)') do
    trunks[#trunks + 1] = {name, tonumber(some), tonumber(theirs)}
    segments, tokens = segments + tonumber(some), tokens + tonumber(theirs)
  end
  return trunks, segments, tokens
end

local function write_trunks(session, trunks)
  local parts = {}
  for i, trunk in ipairs(trunks) do
    parts[i] = trunk[1] .. ':' .. integer(trunk[2]) .. ':' .. integer(trunk[3])
  end
  redis.call('HSET', session, 'trunks', table.concat(parts, ' '))
end

-- Returns the head of a trunk; nil where there is none.
local function read_head(key)
  local text = redis.pcall('LINDEX', key, 0)
  local bytes, hour = string.match(type(text) == 'string' and text or '', '^(%d+)@(%d+)')
  if not bytes then
    return nil
  end
  local users = {}
  for segments, number, tokens in string.gmatch(text, ' (%d+):(%d+):(%d+)') do
    users[tonumber(segments)] = {tonumber(number), tonumber(tokens)}
  end
  return {bytes = tonumber(bytes), hour = tonumber(hour), users = users}
end

local function head_text(head)
  local text = integer(head.bytes) .. '@' .. integer(head.hour)
  for segments, user in pairs(head.users) do
    text = text .. ' ' .. integer(segments) .. ':' .. integer(user[1]) .. ':' .. integer(user[2])
  end
  return text
end

-- Returns the tokens of so many leading segments of a trunk of which a row uses more.
local function tokens_at(transcript, trunk, segments)
  if segments == 0 or segments == trunk[2] then
    return segments == 0 and 0 or trunk[3]
  end
  local key, tokens = trunk_key(transcript, trunk[1]), trunk[3]
  local head = read_head(key)
  if head and head.users[segments] then
    return head.users[segments][2]
  end
  for _, behind in ipairs(redis.call('LRANGE', key, segments + 1, trunk[2])) do
    local _, theirs = cmsgpack.unpack_one(behind)
    tokens = tokens - theirs
  end
  return tokens
end

-- Lets a row use `to` leading segments of a trunk, which have `tokens`, instead of `from`; 0: none. Frees what no row
-- uses any more.
local function use_trunk(transcript, ledger, name, from, to, tokens, now_ms)
  local key = trunk_key(transcript, name)
  local head = read_head(key)
  if not head then
    return
  end
  local function count(segments, by)
    local user = head.users[segments] or {0, tokens}
    user[1] = user[1] + by
    head.users[segments] = segments > 0 and user[1] > 0 and user or nil
  end
  count(from, -1)
  count(to, 1)
  local longest = 0
  for segments in pairs(head.users) do
    longest = math.max(longest, segments)
  end
  local freed = 0
  if longest == 0 then
    freed = head.bytes
    redis.call('UNLINK', key)
  else
    for _, unused in ipairs(redis.call('LRANGE', key, longest + 1, -1)) do
      freed = freed + SEGMENT_BYTES + #unused
    end
    head.bytes = head.bytes - freed
    redis.call('LTRIM', key, 0, longest)
    redis.call('LSET', key, 0, head_text(head))
  end
  if freed > 0 then
    add_bytes(ledger, head.hour * HOUR_MS, -freed, now_ms)
  end
end

-- Lets a row's trunks live as long as the row. `ms`: for which the row's keys are kept; `due_ms`: the row's end.
local function keep_trunks(transcript, ledger, row, due_ms, ms, now_ms)
  for _, trunk in ipairs((read_trunks(row))) do
    local key = trunk_key(transcript, trunk[1])
    local head = read_head(key)
    if head and head.hour < hour_of(due_ms) then
      add_bytes(ledger, head.hour * HOUR_MS, -head.bytes, now_ms)
      add_bytes(ledger, due_ms, head.bytes, now_ms)
      head.hour = hour_of(due_ms)
      redis.call('LSET', key, 0, head_text(head))
    end
    -- An hour more: a row whose end moves within its hour does not tell its trunks.
    if redis.call('PTTL', key) < ms + HOUR_MS then
      redis.call('PEXPIRE', key, integer(ms + HOUR_MS))
    end
  end
end

-- Ends a row's use of its trunks.
local function release_trunks(transcript, ledger, row, now_ms)
  for _, trunk in ipairs((read_trunks(row))) do
    use_trunk(transcript, ledger, trunk[1], trunk[2], 0, 0, now_ms)
  end
end

-- Returns how many segments a row's transcript has; nil when that is not what the row says.
local function segments_of(row, transcript)
  local trunks, shared = read_trunks(row)
  for _, trunk in ipairs(trunks) do
    local length = redis.pcall('LLEN', trunk_key(transcript, trunk[1]))
    if type(length) ~= 'number' or length - 1 < trunk[2] then
      return nil
    end
  end
  local segments = shared + redis.call('LLEN', transcript)
  return segments == tonumber(row.num_segments) and segments or nil
end

-- Returns a transcript's segments behind the first `from`.
local function segments_from(row, transcript, from)
  local trunks, shared = read_trunks(row)
  local own = redis.call('LRANGE', transcript, math.max(from - shared, 0), -1)
  if from >= shared then
    return own
  end
  local found, before = {}, 0
  for _, trunk in ipairs(trunks) do
    local first = math.max(from - before, 0) + 1
    if first <= trunk[2] then
      for _, segment in ipairs(redis.call('LRANGE', trunk_key(transcript, trunk[1]), first, trunk[2])) do
        found[#found + 1] = segment
      end
    end
    before = before + trunk[2]
  end
  for _, segment in ipairs(own) do
    found[#found + 1] = segment
  end
  return found
end
