-- a.lease_id, a.expected_generation, a.cache_ref, a.holder; a.keep: segments that stay; a.added_tokens: tokens of the new
-- segments; a.mark: of the transcript as this commit leaves it; a.request: digest of a request that may come again;
-- a.usage and a.said: as `count_usage` wants them; a.receipt: of the turn; a.forked_from: of a fork; a.room: as
-- `has_room` wants it; a.model_id: for a row without one. ARGV[2] the answer that is kept for the request, ARGV[3...] the new segments, packed.
local row = read_row(SESSION)
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
local generation = a.expected_generation + 1
if row.committed_lease_id == a.lease_id and tonumber(row.generation) == generation then
  -- Written again, so that a WAIT behind it waits for the commit and not for nothing.
  redis.call('HSET', SESSION, 'committed_lease_id', a.lease_id)
  return stored()
end
if row.lease_id ~= a.lease_id or row.pending then
  return {'lease_lost'}
end
if tonumber(row.generation) ~= a.expected_generation then
  return {'generation', row.generation}
end
local keep, num_segments = a.keep, segments_of(row, TRANSCRIPT)
if not num_segments then
  return {'damaged'}
end
if keep > num_segments then
  return {'keep', num_segments}
end
local more = bytes_of_segments(3)
if a.request then
  more = more + ANSWER_BYTES + #ARGV[2]
end
if not has_room(LEDGER, more, a.room, now_ms) then
  return {'bytes'}
end

advance(row, generation, keep, 3, a.added_tokens, a.mark)
-- A branch waits for its first turn under the lease it was reserved with, and is counted with that turn.
local is_branch, used = a.lease_id == BRANCH_LEASE, a.said
if is_branch then
  redis.call('HSET', SESSION, 'lease_id', a.lease_id, 'lease_until_ms', row.lease_until_ms, 'used', used)
  used = ''
elseif row.used then
  count_usage(a.usage, row.used)
  redis.call('HDEL', SESSION, 'used')
end
redis.call('HSET', SESSION,
  'state', is_branch and 'creating' or 'ready', 'cache_ref', a.cache_ref,
  'previous_cache_ref', a.cache_ref == row.cache_ref and row.previous_cache_ref or row.cache_ref, 'holder', a.holder,
  'holders', a.cache_ref == '' and a.holder == '' and row.holders or with_holder(row, a.holder), 'num_turns', integer(tonumber(row.num_turns) + 1),
  'committed_lease_id', a.lease_id)
if a.request then
  keep_answer(a.request, ARGV[2], integer(generation), redis.call('HGET', SESSION, 'expires_at_ms'))
end
if a.model_id ~= '' and row.model_id == '' then
  redis.call('HSET', SESSION, 'model_id', a.model_id)
end
if a.forked_from then
  redis.call('HSET', SESSION, 'forked_from', a.forked_from)
end
count_usage(a.usage, used)
count_saved(used)
keep_receipt(generation, a.receipt)
return stored()
