-- a.lease_id, a.lease_ttl_ms
local row = read_row(SESSION)
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
if row.lease_id ~= a.lease_id or not lease_lives(row, now_ms) then
  return {'lease_lost'}
end
redis.call('HSET', SESSION, 'lease_until_ms', integer(now_ms + a.lease_ttl_ms))
restart_if_sliding(row, now_ms)
return stored()
