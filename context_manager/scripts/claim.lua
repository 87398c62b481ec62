-- KEYS[1]: the claim of the manager that sweeps; a.for_ms: its life. Answers 1 to one caller in that time.
-- The claim is a hash, because the ACL that the documentation names allows no commands for strings.
if redis.call('HSETNX', KEYS[1], 'claimed', 1) == 0 then
  return 0
end
redis.call('PEXPIRE', KEYS[1], integer(a.for_ms))
return 1
