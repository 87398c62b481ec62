-- KEYS[1]: last number of the sender; a.number: of this batch; a.known_ms: how long its last number is remembered; a.usage
-- and a.said: as `count_usage` wants them. Answers 1 behind 'ok', or 0 for a number that is not above the last one.
local said = redis.pcall('HGET', KEYS[1], 'number')
local last = tonumber(said)
if last and a.number <= last then
  -- Written again, so that a WAIT behind it waits for what was counted.
  redis.call('HSET', KEYS[1], 'number', said)
  return {'ok', 0}
end
if not last then
  -- What was spoilt is no number: the batch counts, or it would come again for ever.
  redis.call('UNLINK', KEYS[1])
end
redis.call('HSET', KEYS[1], 'number', integer(a.number))
redis.call('PEXPIRE', KEYS[1], integer(a.known_ms))
count_usage(a.usage, a.said)
return {'ok', 1}
