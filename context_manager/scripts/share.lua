-- Gives a reserved fork the segments of its source, without copying one: the source's own become a trunk of both.
-- ARGV[5] lease_id of the fork, ARGV[6] generation of the source or '', ARGV[7] member of the source, ARGV[8] its id,
-- ARGV[9] name for a new trunk, ARGV[10] trunks that a row may have, ARGV[11] lengths that a trunk is shared at;
-- KEYS[6] row of the source, KEYS[7] its transcript, KEYS[8] its last turns. Answers {'ok', row of the fork, segments}; {'copy'} where they cannot be shared.
local now_ms, tombstone_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
local row = read_row(KEYS[1])
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
if row.committed_lease_id == ARGV[5] or (row.lease_id == ARGV[5] and row.forked_from) then
  -- This very call, whose reply was lost.
  return {'ok', redis.call('HGETALL', KEYS[1]), tonumber(row.num_segments)}
end
if where ~= 'creating' or row.lease_id ~= ARGV[5] or row.pending then
  return {'lease_lost'}
end
local source = read_row(KEYS[6])
local there = standing(source, now_ms, tombstone_ms)
if not is_there(there) then
  return {there}
end
if there == 'creating' then
  return {'busy', integer(tonumber(source.lease_until_ms) - now_ms)}
end
local num_segments = segments_of(source, KEYS[7])
if not num_segments then
  return {'damaged'}
end
local generation = ARGV[6] == '' and source.generation or ARGV[6]
local keep = segments_at(source, tonumber(generation))
if not keep then
  return {'gone', source.generation}
end

local trunks, shared, shared_tokens = read_trunks(source)
local before = 0
for _, trunk in ipairs(trunks) do
  local segments = keep - before
  before = before + trunk[2]
  if segments > 0 and segments < trunk[2] then
    local head = read_head(trunk_key(KEYS[7], trunk[1]))
    if head and not head.users[segments] and head.num_lengths >= tonumber(ARGV[11]) then
      return {'copy'}
    end
  end
end
if keep > shared then
  local trunk = trunk_key(KEYS[7], ARGV[9])
  if #trunks >= tonumber(ARGV[10]) or redis.call('RENAMENX', KEYS[7], trunk) == 0 then
    return {'copy'}
  end
  local segments, tokens = num_segments - shared, tonumber(source.num_tokens) - shared_tokens
  local due_ms, bytes = due_at_ms(source), tonumber(source.segment_bytes) or 0
  local head = {bytes = bytes, hour = hour_of(due_ms), users = {[segments] = {1, tokens, bytes}}}
  redis.call('LPUSH', trunk, head_text(head))
  add_bytes(KEYS[5], due_ms, bytes, now_ms)
  redis.call('PEXPIRE', trunk, integer(keep_ms(due_ms, now_ms, tombstone_ms) + HOUR_MS))
  trunks[#trunks + 1] = {ARGV[9], segments, tokens}
  redis.call('HSET', KEYS[6], 'segment_bytes', '0')
  write_trunks(KEYS[6], trunks)
end
restart_if_sliding(source, now_ms, KEYS[6])
kept(KEYS[6], KEYS[7], ARGV[7], ARGV[8], KEYS[8])

local mine, left, num_tokens = {}, keep, 0
for _, trunk in ipairs(trunks) do
  local segments = math.min(left, trunk[2])
  if segments > 0 then
    local tokens = use_trunk(KEYS[7], KEYS[5], trunk[1], 0, segments, trunk[2], now_ms)
    mine[#mine + 1] = {trunk[1], segments, tokens}
    left, num_tokens = left - segments, num_tokens + tokens
  end
end
write_trunks(KEYS[1], mine)
redis.call('HSET', KEYS[1],
  'num_segments', integer(keep), 'num_tokens', integer(num_tokens), 'forked_from', ARGV[8] .. '@' .. generation)
local answer = stored()
answer[3] = keep
return answer
