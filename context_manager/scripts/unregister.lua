-- No own arguments. Answers the row as it was.
local row = read_row(KEYS[1])
local where = standing(row, tonumber(ARGV[3]), tonumber(ARGV[4]))
if not is_there(where) then
  return {where}
end
local as_it_was = redis.call('HGETALL', KEYS[1])
redis.call('DEL', KEYS[1])
redis.call('UNLINK', KEYS[2])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[2])
return {'ok', as_it_was}
