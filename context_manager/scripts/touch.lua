-- ARGV[5] ttl_s or '', ARGV[6] ttl policy or '', ARGV[7] metadata as JSON or '', ARGV[8] bytes as
-- `has_room` wants them; KEYS[6] the last turns
local now_ms, tombstone_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
local row = read_row(KEYS[1])
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
if where == 'creating' then
  return {'busy', integer(tonumber(row.lease_until_ms) - now_ms)}
end
local more = #ARGV[7] - #(row.metadata or '')
if more > 0 and not has_room(KEYS[5], more, ARGV[8], now_ms) then
  return {'bytes'}
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
return stored(KEYS[6])
