-- KEYS[1] who tells, KEYS[2] the day; ARGV[1] for how many ms its last number is known, ARGV[2] the batch's number,
-- ARGV[3] as `count_usage` wants it
local last = tonumber(redis.pcall('GET', KEYS[1]))
-- What was spoilt is no number: the batch counts, or it would come again for ever.
if last and tonumber(ARGV[2]) <= last then
  return 0
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
count_usage(KEYS[2], ARGV[3])
return 1
