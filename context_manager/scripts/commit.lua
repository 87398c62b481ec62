-- ARGV[5] lease_id, ARGV[6] expected generation, ARGV[7] segments to keep, ARGV[8] cache_ref, ARGV[9] holder,
-- ARGV[10] tokens in the new segments, ARGV[11] mark of the transcript as this commit leaves it, ARGV[12] characters of
-- marks that are kept at most, ARGV[13] digest of the request if it may come again, else '', ARGV[14] what it is answered
-- then, ARGV[15] what was used, as `count_usage` wants it, ARGV[16] the turn's receipt or '', ARGV[17] what a fork was
-- forked from, else '', ARGV[18] bytes as `has_room` wants them, ARGV[19...] the new segments, packed; KEYS[6], if it may
-- come again, as `answered` wants it; the last two of KEYS the last turns and the day's usage
local now_ms, tombstone_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
local row = read_row(KEYS[1])
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
local generation = tonumber(ARGV[6]) + 1
if row.committed_lease_id == ARGV[5] and tonumber(row.generation) == generation then
  -- Written again, so that a WAIT behind it waits for the commit and not for nothing.
  redis.call('HSET', KEYS[1], 'committed_lease_id', ARGV[5])
  return stored()
end
if row.lease_id ~= ARGV[5] or row.pending then
  return {'lease_lost'}
end
if row.generation ~= ARGV[6] then
  return {'generation', row.generation}
end
local keep, num_segments = tonumber(ARGV[7]), segments_of(row, KEYS[2])
if not num_segments then
  return {'damaged'}
end
if keep > num_segments then
  return {'keep', num_segments}
end
local more = bytes_of_segments(19)
if ARGV[13] ~= '' then
  more = more + ANSWER_BYTES + #ARGV[14]
end
if not has_room(KEYS[5], more, ARGV[18], now_ms) then
  return {'bytes'}
end

advance(row, generation, keep, 19, tonumber(ARGV[10]), ARGV[11], tonumber(ARGV[12]))
-- A branch waits for its first turn under the lease it was reserved with, and is counted with that turn.
local is_branch, used = ARGV[5] == BRANCH_LEASE, ARGV[15]
if is_branch then
  redis.call('HSET', KEYS[1], 'lease_id', ARGV[5], 'lease_until_ms', row.lease_until_ms, 'used', used)
  used = ''
elseif row.used then
  count_usage(KEYS[#KEYS], row.used)
  redis.call('HDEL', KEYS[1], 'used')
end
redis.call('HSET', KEYS[1],
  'state', is_branch and 'creating' or 'ready', 'cache_ref', ARGV[8], 'previous_cache_ref', row.cache_ref, 'holder', ARGV[9],
  'holders', with_holder(row, ARGV[9]), 'num_turns', integer(tonumber(row.num_turns) + 1),
  'committed_lease_id', ARGV[5])
if ARGV[13] ~= '' then
  keep_answer(ARGV[13], ARGV[14], integer(generation), redis.call('HGET', KEYS[1], 'expires_at_ms'), now_ms)
end
if ARGV[17] ~= '' then
  redis.call('HSET', KEYS[1], 'forked_from', ARGV[17])
end
count_usage(KEYS[#KEYS], used)
keep_receipt(KEYS[#KEYS - 1], generation, ARGV[16])
return stored(KEYS[#KEYS - 1])
