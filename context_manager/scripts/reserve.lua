-- a.lease_id, a.lease_ttl_ms; a.contexts_max: contexts that the tenant may have, 0 for any number; a.tenant_sets: its sets in
-- the other shards; a.request: digest of a request that may come again; a.room: as `has_room` wants it; a.pending: the row
-- waits for admit.lua; a.model_id, a.mode, a.ttl_s, a.ttl_policy, a.metadata, a.parent:
-- of the new row.
local refused = answered(a.request)
if refused then
  return {refused}
end
local row = read_row(SESSION)
local where = standing(row, now_ms, tombstone_ms)
if where == 'creating' and row.lease_id == a.lease_id then
  return as_it_is()
end
if where == 'creating' and a.request then
  return {'busy', integer(tonumber(row.lease_until_ms) - now_ms)}
end
if is_there(where) then
  return {'exists'}
end
if a.contexts_max > 0 then
  -- A dead row of this very id is about to be replaced.
  local num_contexts = count(TENANT) > 0 and redis.call('ZSCORE', TENANT, a.id) and -1 or 0
  num_contexts = num_contexts + count(TENANT)
  for _, set in ipairs(a.tenant_sets) do
    num_contexts = num_contexts + count(set)
  end
  if num_contexts >= a.contexts_max then
    return {'quota', a.contexts_max}
  end
end
if not has_room(LEDGER, CONTEXT_BYTES, a.room, now_ms) then
  return {'bytes'}
end
redis.call('DEL', SESSION, TRANSCRIPT, TURNS)
release_trunks(TRANSCRIPT, LEDGER, row or {}, now_ms)
uncount_row(LEDGER, row or {}, now_ms)
redis.call('HSET', SESSION,
  'state', 'creating', 'model_id', a.model_id, 'mode', a.mode, 'generation', '0', 'cache_ref', '',
  'previous_cache_ref', '', 'holder', '', 'holders', '', 'created_at_ms', integer(now_ms),
  'expires_at_ms', integer(now_ms + a.ttl_s * 1000), 'ttl_s', integer(a.ttl_s), 'ttl_policy', a.ttl_policy,
  'num_tokens', '0', 'num_turns', '0', 'num_segments', '0', 'metadata', a.metadata, 'lease_id', a.lease_id,
  'lease_until_ms', integer(now_ms + a.lease_ttl_ms), 'committed_lease_id', '', 'marks', '0', 'generations', '0',
  'parent', a.parent)
if a.pending then
  redis.call('HSET', SESSION, 'pending', '1')
end
return stored()
