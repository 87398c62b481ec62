-- Put behind bytes.lua: segments that contexts of one tenant and shard share (ADR 0098).
--
-- A trunk is a list: its head, then segments, which never change. A transcript is the leading segments of its row's
-- trunks, in their order, and then its own list. A row's field `trunks` is `name:segments:tokens` again and again.
-- The head is `bytes@hour`, what the ledger counts and until when, then ` segments:users:tokens:bytes` for each number
-- of leading segments that rows use. The longest use decides how long the trunk is; without a user it is deleted.
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

-- Returns the head of a trunk; nil where there is none. `users`: {number of rows, tokens, bytes} by leading segments.
local function read_head(key)
  local text = redis.pcall('LINDEX', key, 0)
  local bytes, hour = string.match(type(text) == 'string' and text or '', '^(%d+)@(%d+)')
  if not bytes then
    return nil
  end
  local users, num_lengths = {}, 0
  for segments, number, tokens, theirs in string.gmatch(text, ' (%d+):(%d+):(%d+):(%d+)') do
    users[tonumber(segments)] = {tonumber(number), tonumber(tokens), tonumber(theirs)}
    num_lengths = num_lengths + 1
  end
  return {bytes = tonumber(bytes), hour = tonumber(hour), users = users, num_lengths = num_lengths}
end

local function head_text(head)
  local parts = {integer(head.bytes) .. '@' .. integer(head.hour)}
  for segments, user in pairs(head.users) do
    parts[#parts + 1] = string.format('%.0f:%.0f:%.0f:%.0f', segments, unpack(user))
  end
  return table.concat(parts, ' ')
end

-- Returns tokens and bytes of so many leading segments of a trunk; `longer`: what a row uses, so many or more. Reads
-- what is between the two, once: the head knows it then.
local function measured(key, head, segments, longer)
  local known, from = head.users[segments], head.users[longer]
  if known or not from then
    return (known or {0, 0})[2], (known or {0, 0, 0})[3]
  end
  local tokens, bytes = from[2], from[3]
  for _, behind in ipairs(redis.call('LRANGE', key, segments + 1, longer)) do
    local _, theirs = cmsgpack.unpack_one(behind)
    tokens, bytes = tokens - theirs, bytes - SEGMENT_BYTES - #behind
  end
  return tokens, bytes
end

-- Lets a row use `to` leading segments of a trunk instead of `from`; 0: none. `longer`: as in `measured`. Returns the
-- tokens of `to`. Frees what no row uses any more.
local function use_trunk(transcript, ledger, name, from, to, longer, now_ms)
  local key = trunk_key(transcript, name)
  local head = read_head(key)
  if not head then
    return 0
  end
  local tokens = 0
  if to > 0 then
    local user = head.users[to] or {0, measured(key, head, to, longer)}
    user[1], tokens = user[1] + 1, user[2]
    head.users[to] = user
  end
  local before = head.users[from]
  if before then
    before[1] = before[1] - 1
    head.users[from] = before[1] > 0 and before or nil
  end
  local longest = 0
  for segments in pairs(head.users) do
    longest = math.max(longest, segments)
  end
  local left = longest > 0 and head.users[longest][3] or 0
  if left < head.bytes then
    add_bytes(ledger, head.hour * HOUR_MS, left - head.bytes, now_ms)
    redis.call('LTRIM', key, 0, longest)
    head.bytes = left
  end
  if longest == 0 then
    redis.call('UNLINK', key)
  else
    redis.call('LSET', key, 0, head_text(head))
  end
  return tokens
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
