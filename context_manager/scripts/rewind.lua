-- ARGV[5] generation to go back to, ARGV[6] expected generation or '', ARGV[7] mark of the transcript as it is then,
-- ARGV[8] characters of marks that are kept at most; KEYS[6] the last turns. A context that stands there already stays as it is.

-- Written again, so that a WAIT behind it waits for what took the context there, and not for nothing.
local function stand_still(row)
  redis.call('HSET', KEYS[1], 'generation', row.generation)
  return stored(KEYS[6])
end

local now_ms, tombstone_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
local row = read_row(KEYS[1])
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
local newest = read_marks(row)[1]
if newest and newest[1] == ARGV[7] then
  -- This very call, whose reply was lost: nobody else has its mark.
  return stand_still(row)
end
if where == 'live' and ARGV[6] ~= '' and row.generation ~= ARGV[6] then
  return {'generation', row.generation}
end
if where == 'creating' or lease_lives(row, now_ms) then
  return {'busy', integer(tonumber(row.lease_until_ms) - now_ms)}
end
local num_segments = segments_of(row, KEYS[2])
if not num_segments then
  return {'damaged'}
end
local keep = segments_at(row, tonumber(ARGV[5]))
if not keep then
  return {'gone', row.generation}
end
if keep == num_segments then
  return stand_still(row)
end
advance(row, tonumber(row.generation) + 1, keep, #ARGV + 1, 0, ARGV[7], tonumber(ARGV[8]))
-- The KV that is named stays: of a longer conversation, it serves the beginning.
redis.call('HSET', KEYS[1], 'committed_lease_id', '')
return stored(KEYS[6])
