-- ARGV[5] lease_id. Answers {'ok'} always: another's lease is left alone.
local row = read_row(KEYS[1])
if not row or row.state == 'tombstone' or row.lease_id ~= ARGV[5] then
  return {'ok'}
end
if row.state == 'creating' then
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('ZREM', KEYS[3], ARGV[1])
  redis.call('ZREM', KEYS[4], ARGV[2])
else
  redis.call('HSET', KEYS[1], 'lease_id', '', 'lease_until_ms', '0')
end
return {'ok'}
