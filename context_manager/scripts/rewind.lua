-- a.generation: to go back to; a.expected_generation; a.mark: of the transcript as it is then. A context that is at that
-- generation already stays as it is.

-- Written again, so that a WAIT behind it waits for what took the context there, and not for nothing.
local function stand_still(row)
  redis.call('HSET', SESSION, 'generation', row.generation)
  return stored()
end

local row = read_row(SESSION)
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
local newest = read_marks(row)[1]
if newest and newest[1] == a.mark then
  -- This very call, whose reply was lost: nobody else has its mark.
  return stand_still(row)
end
if where == 'live' and a.expected_generation and tonumber(row.generation) ~= a.expected_generation then
  return {'generation', row.generation}
end
if where == 'creating' or lease_lives(row, now_ms) then
  return {'busy', integer(tonumber(row.lease_until_ms) - now_ms)}
end
local num_segments = segments_of(row, TRANSCRIPT)
if not num_segments then
  return {'damaged'}
end
local keep = segments_at(row, a.generation)
if not keep then
  return {'gone', row.generation}
end
if keep == num_segments then
  return stand_still(row)
end
advance(row, tonumber(row.generation) + 1, keep, #ARGV + 1, 0, a.mark)
-- The KV that is named stays: of a longer conversation, it serves the beginning.
redis.call('HSET', SESSION, 'committed_lease_id', '')
return stored()
