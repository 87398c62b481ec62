-- Answers the row.
local where = standing(read_row(SESSION), now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
return as_it_is()
