-- a.lease_id, a.lease_ttl_ms, a.read_only, a.expected_generation; a.known_mark: mark of the transcript as the caller knows
-- it; a.request and a.room: as in reserve.lua; a.for_fork: the transcript is copied; a.at_generation: the transcript ends
-- where that generation did.
-- Answers {'ok', row, time, number of segments that the caller knows, the other segments}.
local refused = answered(a.request)
if refused then
  return {refused}
end
local row = read_row(SESSION)
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
if where == 'creating' and (row.generation == '0' or a.for_fork) then
  return {'busy', integer(tonumber(row.lease_until_ms) - now_ms)}
end
if a.expected_generation and tonumber(row.generation) ~= a.expected_generation then
  return {'generation', row.generation}
end
local takes_lease = not a.read_only and row.mode ~= 'prefix'
local is_free = not lease_lives(row, now_ms) or row.lease_id == a.lease_id or row.lease_id == BRANCH_LEASE
if takes_lease and not is_free then
  return {'busy', integer(tonumber(row.lease_until_ms) - now_ms)}
end
if not segments_of(row, TRANSCRIPT) then
  return {'damaged'}
end
local keep = a.at_generation and segments_at(row, a.at_generation) or tonumber(row.num_segments)
if a.at_generation and not segments_at(row, a.at_generation) then
  return {'gone', row.generation}
end
if takes_lease and not has_room(LEDGER, CONTEXT_BYTES, a.room, now_ms) then
  return {'bytes'}
end
if takes_lease then
  redis.call('HSET', SESSION, 'lease_id', a.lease_id, 'lease_until_ms', integer(now_ms + a.lease_ttl_ms))
end
restart_if_sliding(row, now_ms)
local known = 0
for _, entry in ipairs(read_marks(row)) do
  if entry[1] == a.known_mark then
    known = entry[2]
  end
end
-- A reader of a fixed life changes nothing, so nothing has to be replicated.
local answer = (takes_lease or row.ttl_policy == 'sliding') and stored() or as_it_is()
answer[4] = known
answer[5] = segments_from(row, TRANSCRIPT, known)
for i = #answer[5], keep - known + 1, -1 do
  answer[5][i] = nil
end
return answer
