-- ARGV[5] ttl_s or '', ARGV[6] ttl policy or '', ARGV[7] metadata as JSON or ''; KEYS[5] the last turns
local now_ms, tombstone_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
local row = read_row(KEYS[1])
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
if where == 'creating' then
  return {'busy', integer(tonumber(row.lease_until_ms) - now_ms)}
end
if ARGV[5] ~= '' then
  local expires_at_ms = integer(now_ms + tonumber(ARGV[5]) * 1000)
  redis.call('HSET', KEYS[1], 'ttl_s', ARGV[5], 'expires_at_ms', expires_at_ms)
end
if ARGV[6] ~= '' then
  redis.call('HSET', KEYS[1], 'ttl_policy', ARGV[6])
end
if ARGV[7] ~= '' then
  redis.call('HSET', KEYS[1], 'metadata', ARGV[7])
end
return stored(KEYS[5])
