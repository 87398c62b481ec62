-- ARGV[5] lease_id, ARGV[6] lease_until_ms, ARGV[7] '1' for read only, ARGV[8] expected generation or '',
-- ARGV[9] mark of the transcript as the caller knows it, or '', ARGV[10] and ARGV[11] as in reserve.lua 7 and 8; the last
-- of KEYS the last turns. Answers {'ok', row, segments the caller knows, the others}
local now_ms, tombstone_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
local refused = answered(ARGV[10])
if refused then
  return {refused}
end
local row = read_row(KEYS[1])
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
if where == 'creating' and row.generation == '0' then
  return {'busy', integer(tonumber(row.lease_until_ms) - now_ms)}
end
if ARGV[8] ~= '' and row.generation ~= ARGV[8] then
  return {'generation', row.generation}
end
local takes_lease = ARGV[7] ~= '1' and row.mode ~= 'prefix'
local is_free = not lease_lives(row, now_ms) or row.lease_id == ARGV[5] or row.lease_id == BRANCH_LEASE
if takes_lease and not is_free then
  return {'busy', integer(tonumber(row.lease_until_ms) - now_ms)}
end
if not segments_of(row, KEYS[2]) then
  return {'damaged'}
end
if takes_lease and not has_room(KEYS[5], CONTEXT_BYTES, ARGV[11], now_ms) then
  return {'bytes'}
end
if takes_lease then
  redis.call('HSET', KEYS[1], 'lease_id', ARGV[5], 'lease_until_ms', ARGV[6])
end
restart_if_sliding(row, now_ms)
local known = 0
for _, entry in ipairs(read_marks(row)) do
  if entry[1] == ARGV[9] then
    known = entry[2]
  end
end
-- A reader of a fixed life has changed nothing that would have to be replicated.
local answer = (takes_lease or row.ttl_policy == 'sliding') and stored(KEYS[#KEYS]) or {'ok', redis.call('HGETALL', KEYS[1])}
answer[3] = known
answer[4] = segments_from(row, KEYS[2], known)
return answer
