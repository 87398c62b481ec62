-- ARGV[5] an endpoint that may have KV of the session from now on
local row = read_row(KEYS[1])
local where = standing(row, tonumber(ARGV[3]), tonumber(ARGV[4]))
if not is_there(where) then
  return {where}
end
redis.call('HSET', KEYS[1], 'holders', with_holder(row, ARGV[5]))
return stored()
