-- ARGV[5] lease_id; KEYS[6] the place in lists. Answers {'ok'} always: another's lease is left alone.
local row = read_row(KEYS[1])
if not row or row.state == 'tombstone' or row.lease_id ~= ARGV[5] then
  return {'ok'}
end
if row.state == 'creating' then
  removed(row)
else
  redis.call('HSET', KEYS[1], 'lease_id', '', 'lease_until_ms', '0')
  stored()
end
return {'ok'}
