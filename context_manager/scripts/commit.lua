-- ARGV[5] lease_id, ARGV[6] expected generation, ARGV[7] segments to keep, ARGV[8] cache_ref, ARGV[9] holder,
-- ARGV[10] tokens in the new segments, ARGV[11] mark of the transcript as this commit leaves it, ARGV[12] characters of
-- marks that are kept at most, ARGV[13...] the new segments, packed
local now_ms, tombstone_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
local row = read_row(KEYS[1])
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
local generation = tonumber(ARGV[6]) + 1
if row.committed_lease_id == ARGV[5] and tonumber(row.generation) == generation then
  -- Written again, so that a WAIT behind it waits for the commit and not for nothing.
  redis.call('HSET', KEYS[1], 'committed_lease_id', ARGV[5])
  return stored()
end
if row.lease_id ~= ARGV[5] or row.pending then
  return {'lease_lost'}
end
if row.generation ~= ARGV[6] then
  return {'generation', row.generation}
end
local keep, num_segments = tonumber(ARGV[7]), redis.call('LLEN', KEYS[2])
if num_segments ~= tonumber(row.num_segments) then
  return {'damaged'}
end
if keep > num_segments then
  return {'keep', num_segments}
end

local num_tokens = tonumber(row.num_tokens) + tonumber(ARGV[10])
if keep < num_segments then
  for _, dropped in ipairs(redis.call('LRANGE', KEYS[2], keep, -1)) do
    local _, dropped_tokens = cmsgpack.unpack_one(dropped)
    num_tokens = num_tokens - dropped_tokens
  end
  if keep == 0 then
    redis.call('DEL', KEYS[2])
  else
    redis.call('LTRIM', KEYS[2], 0, keep - 1)
  end
end
for i = 13, #ARGV do
  redis.call('RPUSH', KEYS[2], ARGV[i])
end
num_segments = keep + #ARGV - 12
local marks = integer(generation) .. ' ' .. ARGV[11] .. ':' .. integer(num_segments)
for _, entry in ipairs(read_marks(row)) do
  local longer = marks .. ' ' .. entry[1] .. ':' .. integer(math.min(entry[2], keep))
  if #longer > tonumber(ARGV[12]) then
    break
  end
  marks = longer
end
local expires_at_ms = row.expires_at_ms
if row.ttl_policy == 'sliding' then
  expires_at_ms = integer(now_ms + tonumber(row.ttl_s) * 1000)
end
redis.call('HSET', KEYS[1],
  'state', 'ready', 'generation', integer(generation), 'expires_at_ms', expires_at_ms,
  'cache_ref', ARGV[8], 'previous_cache_ref', row.cache_ref, 'holder', ARGV[9],
  'holders', with_holder(row, ARGV[9]),
  'num_tokens', integer(num_tokens), 'num_turns', integer(tonumber(row.num_turns) + 1),
  'num_segments', integer(num_segments), 'marks', marks,
  'lease_id', '', 'lease_until_ms', '0', 'committed_lease_id', ARGV[5])
return stored()
