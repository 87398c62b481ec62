-- ARGV[5] an endpoint that may have KV of the session from now on, ARGV[6] the holder whose place it takes, or nobody
local row = read_row(KEYS[1])
local where = standing(row, tonumber(ARGV[3]), tonumber(ARGV[4]))
if not is_there(where) then
  return {where}
end
local holder = row.holder
if ARGV[6] ~= '' and holder == ARGV[6] then
  holder = ARGV[5]
end
redis.call('HSET', KEYS[1], 'holders', with_holder(row, ARGV[5]), 'holder', holder)
return stored()
