-- ARGV[5] lease_id, ARGV[6] lease_until_ms; KEYS[6] the last turns
local now_ms, tombstone_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
local row = read_row(KEYS[1])
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
if row.lease_id ~= ARGV[5] or not lease_lives(row, now_ms) then
  return {'lease_lost'}
end
redis.call('HSET', KEYS[1], 'lease_until_ms', ARGV[6])
restart_if_sliding(row, now_ms)
return stored(KEYS[6])
