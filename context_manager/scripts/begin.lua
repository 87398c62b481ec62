-- ARGV[5] lease_id, ARGV[6] lease_until_ms, ARGV[7] '1' for read only, ARGV[8] expected generation or ''
local now_ms, tombstone_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
local row = read_row(KEYS[1])
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
if where == 'creating' then
  return {'busy', integer(tonumber(row.lease_until_ms) - now_ms)}
end
if ARGV[8] ~= '' and row.generation ~= ARGV[8] then
  return {'generation', row.generation}
end
local takes_lease = ARGV[7] ~= '1' and row.mode ~= 'prefix'
if takes_lease and lease_lives(row, now_ms) and row.lease_id ~= ARGV[5] then
  return {'busy', integer(tonumber(row.lease_until_ms) - now_ms)}
end
if redis.call('LLEN', KEYS[2]) ~= tonumber(row.num_segments) then
  return {'damaged'}
end
if takes_lease then
  redis.call('HSET', KEYS[1], 'lease_id', ARGV[5], 'lease_until_ms', ARGV[6])
end
if row.ttl_policy == 'sliding' then
  local expires_at_ms = integer(now_ms + tonumber(row.ttl_s) * 1000)
  redis.call('HSET', KEYS[1], 'expires_at_ms', expires_at_ms)
  redis.call('ZADD', KEYS[3], expires_at_ms, ARGV[1])
end
return {'ok', redis.call('HGETALL', KEYS[1]), redis.call('LRANGE', KEYS[2], 0, -1)}
