-- Put behind row.lua: what a new generation does to a transcript, and how to know it again.

-- Where each generation ended, `7 1-5:2+2 7-7:6+0` was written at generation 7: {{first, last, segments of the first, step}, ...}, the oldest first.
local function read_runs(row)
  local runs = {}
  if row.generations and string.match(row.generations, '^%d+') == row.generation then
    for first, last, segments, step in string.gmatch(row.generations, ' (%d+)-(%d+):(%d+)%+(%d+)') do
      runs[#runs + 1] = {tonumber(first), tonumber(last), tonumber(segments), tonumber(step)}
    end
  end
  return runs
end

-- Returns how many leading segments a generation was, nil for one that is not there.
local function segments_at(row, generation)
  if generation == tonumber(row.generation) then
    return tonumber(row.num_segments)
  end
  for _, run in ipairs(read_runs(row)) do
    if run[1] <= generation and generation <= run[2] then
      return run[3] + run[4] * (generation - run[1])
    end
  end
end

local function generations_after(row, generation, keep, num_segments)
  local runs = {}
  for _, run in ipairs(read_runs(row)) do
    local first, last, segments, step = unpack(run)
    if segments <= keep then
      last = step > 0 and math.min(last, first + math.floor((keep - segments) / step)) or last
      runs[#runs + 1] = {first, last, segments, last > first and step or 0}
    end
  end
  local newest = runs[#runs]
  local added = newest and num_segments - newest[3] - newest[4] * (newest[2] - newest[1])
  if newest and newest[2] == generation - 1 and (newest[1] == newest[2] or newest[4] == added) then
    newest[2], newest[4] = generation, added
  else
    runs[#runs + 1] = {generation, generation, num_segments, 0}
  end
  local field = integer(generation)
  for i = math.max(1, #runs - RUNS_MAX + 1), #runs do
    local first, last, segments, step = unpack(runs[i])
    field = field .. ' ' .. integer(first) .. '-' .. integer(last) .. ':' .. integer(segments) .. '+' .. integer(step)
  end
  return field
end

local function marks_after(row, generation, keep, num_segments, mark)
  local marks = integer(generation) .. ' ' .. mark .. ':' .. integer(num_segments)
  for _, entry in ipairs(read_marks(row)) do
    local longer = marks .. ' ' .. entry[1] .. ':' .. integer(math.min(entry[2], keep))
    if #longer > MARKS_CHARS_MAX then
      break
    end
    marks = longer
  end
  return marks
end

-- Returns the bytes of the segments in ARGV from `first` on, and what Redis needs to hold them.
local function bytes_of_segments(first)
  local bytes = 0
  for i = first, #ARGV do
    bytes = bytes + SEGMENT_BYTES + #ARGV[i]
  end
  return bytes
end

-- Cuts the transcript to `keep` segments. Returns what is left of its tokens and of the bytes of its own list.
local function cut(row, keep, num_tokens, segment_bytes)
  local trunks, shared = read_trunks(row)
  for _, dropped in ipairs(redis.call('LRANGE', TRANSCRIPT, math.max(keep - shared, 0), -1)) do
    local _, dropped_tokens = cmsgpack.unpack_one(dropped)
    num_tokens = num_tokens - dropped_tokens
    segment_bytes = segment_bytes - SEGMENT_BYTES - #dropped
  end
  if keep > shared then
    redis.call('LTRIM', TRANSCRIPT, 0, keep - shared - 1)
    return num_tokens, segment_bytes
  end
  redis.call('DEL', TRANSCRIPT)
  local left, before = {}, 0
  for _, trunk in ipairs(trunks) do
    local segments = math.max(math.min(keep - before, trunk[2]), 0)
    before = before + trunk[2]
    local tokens = trunk[3]
    if segments < trunk[2] then
      tokens = use_trunk(TRANSCRIPT, LEDGER, trunk[1], trunk[2], segments, trunk[2], now_ms)
    end
    if segments > 0 then
      left[#left + 1] = {trunk[1], segments, tokens}
    end
    num_tokens = num_tokens - trunk[3] + tokens
  end
  if #trunks > 0 then
    write_trunks(SESSION, left)
  end
  return num_tokens, segment_bytes
end

-- Cuts the transcript to `keep` segments, adds those in ARGV from `first` on, which have `added_tokens`, and writes what
-- every new generation changes: the lease is free, a sliding life starts again.
local function advance(row, generation, keep, first, added_tokens, mark)
  local num_tokens = tonumber(row.num_tokens) + added_tokens
  local segment_bytes = (tonumber(row.segment_bytes) or 0) + bytes_of_segments(first)
  if keep < tonumber(row.num_segments) then
    num_tokens, segment_bytes = cut(row, keep, num_tokens, segment_bytes)
  end
  for i = first, #ARGV do
    redis.call('RPUSH', TRANSCRIPT, ARGV[i])
  end
  local num_segments = keep + #ARGV - first + 1
  local expires_at_ms = row.expires_at_ms
  if row.ttl_policy == 'sliding' then
    expires_at_ms = integer(now_ms + tonumber(row.ttl_s) * 1000)
  end
  redis.call('HSET', SESSION,
    'generation', integer(generation), 'expires_at_ms', expires_at_ms,
    'num_tokens', integer(num_tokens), 'num_segments', integer(num_segments),
    'segment_bytes', integer(math.max(segment_bytes, 0)),
    'marks', marks_after(row, generation, keep, num_segments, mark),
    'generations', generations_after(row, generation, keep, num_segments),
    'lease_id', '', 'lease_until_ms', '0')
end
