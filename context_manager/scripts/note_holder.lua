-- a.holder: an endpoint that may have KV of the session from now on; a.instead_of: the holder whose place it takes, or ''.
local row = read_row(SESSION)
local where = standing(row, now_ms, tombstone_ms)
if not is_there(where) then
  return {where}
end
local holder = row.holder
if a.instead_of ~= '' and holder == a.instead_of then
  holder = a.holder
end
redis.call('HSET', SESSION, 'holders', with_holder(row, a.holder), 'holder', holder)
return stored()
