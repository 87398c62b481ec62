-- No own arguments; KEYS[6] the place in lists, KEYS[7] the last turns. Answers the row as it was.
local row = read_row(KEYS[1])
local where = standing(row, tonumber(ARGV[3]), tonumber(ARGV[4]))
if not is_there(where) then
  return {where}
end
local as_it_was = redis.call('HGETALL', KEYS[1])
removed(row)
return {'ok', as_it_was}
