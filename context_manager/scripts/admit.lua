-- ARGV[5] lease_id, ARGV[6] contexts the tenant may have, ARGV[7] contexts it has, this one included.
-- Ends the wait of a reservation for its tenant's limit: it stays, or it is taken back.
local row = read_row(KEYS[1])
if not row or row.state ~= 'creating' or row.lease_id ~= ARGV[5] then
  return {'quota', ARGV[6]}
end
if row.pending then
  if tonumber(ARGV[7]) > tonumber(ARGV[6]) then
    removed(row)
    return {'quota', ARGV[6]}
  end
  redis.call('HDEL', KEYS[1], 'pending')
end
return stored()
