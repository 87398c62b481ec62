-- Gives a reserved fork the segments of its source, without copying one: the source's own become a trunk of both.
-- a.lease_id: of the fork; a.generation: of the source; a.source: its keys as in `session_keys`, its member and id;
-- a.name: for a new trunk.
-- Answers {'ok', row of the fork, time, segments}, or {'copy'} where they cannot be shared.
local SOURCE, SOURCE_TRANSCRIPT, SOURCE_TURNS = a.source.keys[1], a.source.keys[2], a.source.keys[6]
local row = read_row(SESSION)
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
if row.committed_lease_id == a.lease_id or (row.lease_id == a.lease_id and row.forked_from) then
  -- This very call, whose reply was lost.
  local answer = as_it_is()
  answer[4] = tonumber(row.num_segments)
  return answer
end
if where ~= 'creating' or row.lease_id ~= a.lease_id or row.pending then
  return {'lease_lost'}
end
local source = read_row(SOURCE)
local there = standing(source, now_ms, tombstone_ms)
if not is_there(there) then
  return {there}
end
if there == 'creating' then
  return {'busy', integer(tonumber(source.lease_until_ms) - now_ms)}
end
local num_segments = segments_of(source, SOURCE_TRANSCRIPT)
if not num_segments then
  return {'damaged'}
end
local generation = a.generation or tonumber(source.generation)
local keep = segments_at(source, generation)
if not keep then
  return {'gone', source.generation}
end

local trunks, shared, shared_tokens = read_trunks(source)
local before = 0
for _, trunk in ipairs(trunks) do
  local segments = keep - before
  before = before + trunk[2]
  if segments > 0 and segments < trunk[2] then
    local head = read_head(trunk_key(SOURCE_TRANSCRIPT, trunk[1]))
    if head and not head.users[segments] and head.num_lengths >= LENGTHS_MAX then
      return {'copy'}
    end
  end
end
if keep > shared then
  local trunk = trunk_key(SOURCE_TRANSCRIPT, a.name)
  if #trunks >= TRUNKS_MAX or redis.call('RENAMENX', SOURCE_TRANSCRIPT, trunk) == 0 then
    return {'copy'}
  end
  local segments, tokens = num_segments - shared, tonumber(source.num_tokens) - shared_tokens
  local due_ms, bytes = due_at_ms(source), tonumber(source.segment_bytes) or 0
  local head = {bytes = bytes, hour = hour_of(due_ms), users = {[segments] = {1, tokens, bytes}}}
  redis.call('LPUSH', trunk, head_text(head))
  add_bytes(LEDGER, due_ms, bytes, now_ms)
  redis.call('PEXPIRE', trunk, integer(keep_ms(due_ms, now_ms, tombstone_ms) + HOUR_MS))
  trunks[#trunks + 1] = {a.name, segments, tokens}
  redis.call('HSET', SOURCE, 'segment_bytes', '0')
  write_trunks(SOURCE, trunks)
end
restart_if_sliding(source, now_ms, SOURCE)
kept(SOURCE, SOURCE_TRANSCRIPT, SOURCE_TURNS, a.source.member, a.source.id)

local mine, left, num_tokens = {}, keep, 0
for _, trunk in ipairs(trunks) do
  local segments = math.min(left, trunk[2])
  if segments > 0 then
    local tokens = use_trunk(SOURCE_TRANSCRIPT, LEDGER, trunk[1], 0, segments, trunk[2], now_ms)
    mine[#mine + 1] = {trunk[1], segments, tokens}
    left, num_tokens = left - segments, num_tokens + tokens
  end
end
write_trunks(SESSION, mine)
redis.call('HSET', SESSION,
  'num_segments', integer(keep), 'num_tokens', integer(num_tokens), 'forked_from', a.source.id .. '@' .. integer(generation))
local answer = stored()
answer[4] = keep
return answer
