-- Put behind row.lua: what is kept of requests that may come again.

-- Returns 'answered' or 'key_reused' for a request that must not run again, nil for any other.
local function answered(request)
  if not request then
    return nil
  end
  local known = redis.call('HGET', ANSWER, 'request')
  if known == request then
    -- Written again, so that a WAIT behind it waits for the answer; by what a full Redis takes, too.
    redis.call('PEXPIRE', ANSWER, redis.call('PTTL', ANSWER))
    return 'answered'
  end
  return known and 'key_reused' or nil
end

-- Keeps what a request is answered when it comes again.
local function keep_answer(request, answer, generation, expires_at_ms)
  redis.call('HSET', ANSWER,
    'request', request, 'answer', answer, 'generation', generation, 'expires_at_ms', expires_at_ms)
  redis.call('PEXPIRE', ANSWER, integer(ANSWER_KEPT_MS))
  add_bytes(LEDGER, now_ms + ANSWER_KEPT_MS, ANSWER_BYTES + #answer, now_ms)
  keep_ledger(LEDGER, ANSWER_KEPT_MS)
end
