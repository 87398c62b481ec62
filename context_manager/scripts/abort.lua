-- a.lease_id. Answers {'ok'} always: another's lease is left alone.
local row = read_row(SESSION)
if not row or row.state == 'tombstone' or row.lease_id ~= a.lease_id then
  return {'ok'}
end
if row.state == 'creating' then
  removed(row, PLACE)
else
  redis.call('HSET', SESSION, 'lease_id', '', 'lease_until_ms', '0')
  stored()
end
return {'ok'}
