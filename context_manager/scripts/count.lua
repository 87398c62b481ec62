-- KEYS[1] who tells, KEYS[2] the day; ARGV[1] for how many ms its last number is known, ARGV[2] the batch's number,
-- ARGV[3] as `count_usage` wants it. Answers 1 behind 'ok', or 0 for a number that is not above the last one.
local said = redis.pcall('HGET', KEYS[1], 'number')
local last = tonumber(said)
if last and tonumber(ARGV[2]) <= last then
  -- Written again, so that a WAIT behind it waits for what was counted.
  redis.call('HSET', KEYS[1], 'number', said)
  return {'ok', 0}
end
if not last then
  -- What was spoilt is no number: the batch counts, or it would come again for ever.
  redis.call('UNLINK', KEYS[1])
end
redis.call('HSET', KEYS[1], 'number', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
count_usage(KEYS[2], ARGV[3])
return {'ok', 1}
