-- ARGV[5] lease_id, ARGV[6] lease_until_ms, ARGV[7] created_at_ms, ARGV[8...] the new row as field, value, ...
local now_ms, tombstone_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
local row = read_row(KEYS[1])
local where = standing(row, now_ms, tombstone_ms)
if where == 'creating' and row.lease_id == ARGV[5] then
  return {'ok', redis.call('HGETALL', KEYS[1])}
end
if is_there(where) then
  return {'exists'}
end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], unpack(ARGV, 8))
redis.call('ZADD', KEYS[3], ARGV[6], ARGV[1])
redis.call('ZADD', KEYS[4], ARGV[7], ARGV[2])
return {'ok', redis.call('HGETALL', KEYS[1])}
