-- Answers the row.
local flat = redis.call('HGETALL', SESSION)
local where = standing(row_of(flat), now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
return {'ok', flat, string.format('%.0f', now_ms)}
