-- a.ttl_s, a.ttl_policy, a.metadata as JSON: each may be missing; a.room: as `has_room` wants it
local row = read_row(SESSION)
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
if where == 'creating' then
  return {'busy', integer(tonumber(row.lease_until_ms) - now_ms)}
end
local more = #(a.metadata or '') - #(row.metadata or '')
if more > 0 and not has_room(LEDGER, more, a.room, now_ms) then
  return {'bytes'}
end
if a.ttl_s then
  redis.call('HSET', SESSION, 'ttl_s', integer(a.ttl_s), 'expires_at_ms', integer(now_ms + a.ttl_s * 1000))
end
for _, name in ipairs({'ttl_policy', 'metadata'}) do
  if a[name] then
    redis.call('HSET', SESSION, name, a[name])
  end
end
return stored()
