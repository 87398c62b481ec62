-- a.lease_id; a.contexts_max: contexts that the tenant may have; a.num_contexts: those it has, this one included.
-- Ends the wait of a reservation for its tenant's limit: it stays, or it is taken back.
local row = read_row(SESSION)
if not row or row.state ~= 'creating' or row.lease_id ~= a.lease_id then
  return {'quota', a.contexts_max}
end
if row.pending then
  if a.num_contexts > a.contexts_max then
    removed(row)
    return {'quota', a.contexts_max}
  end
  redis.call('HDEL', SESSION, 'pending')
end
return stored()
