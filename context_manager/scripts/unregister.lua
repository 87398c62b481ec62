-- Answers the row as it was.
local row = read_row(SESSION)
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
local answer = as_it_is()
removed(row, PLACE)
return answer
