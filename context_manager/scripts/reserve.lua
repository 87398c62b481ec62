-- ARGV[5] lease_id, ARGV[6] contexts the tenant may have, 0 for any number, ARGV[7] digest of the request if it may come
-- again, else '', ARGV[8] bytes as `has_room` wants them, ARGV[9...] the new row as field, value, ...; KEYS[6], if it may
-- come again, as `answered` wants it, then the tenant's sets in the other shards, then the last turns.
local now_ms, tombstone_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
local refused = answered(ARGV[7])
if refused then
  return {refused}
end
local row = read_row(KEYS[1])
local where = standing(row, now_ms, tombstone_ms)
if where == 'creating' and row.lease_id == ARGV[5] then
  return {'ok', redis.call('HGETALL', KEYS[1])}
end
if where == 'creating' and ARGV[7] ~= '' then
  return {'busy', integer(tonumber(row.lease_until_ms) - now_ms)}
end
if is_there(where) then
  return {'exists'}
end
local contexts_max = tonumber(ARGV[6])
if contexts_max > 0 then
  -- A dead row of this very id is about to be replaced.
  local num_contexts = count(KEYS[4]) > 0 and redis.call('ZSCORE', KEYS[4], ARGV[2]) and -1 or 0
  num_contexts = num_contexts + count(KEYS[4])
  for i = ARGV[7] == '' and 6 or 7, #KEYS - 1 do
    num_contexts = num_contexts + count(KEYS[i])
  end
  if num_contexts >= contexts_max then
    return {'quota', contexts_max}
  end
end
if not has_room(KEYS[5], CONTEXT_BYTES, ARGV[8], now_ms) then
  return {'bytes'}
end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[#KEYS])
release_trunks(KEYS[2], KEYS[5], row or {}, now_ms)
uncount_row(KEYS[5], row or {}, now_ms)
redis.call('HSET', KEYS[1], unpack(ARGV, 9))
return stored()
