-- KEYS[1] who sweeps, ARGV[1] ms until the next may. Answers 1 to one caller in so many ms.
-- A hash, as every key of ours but lists and sets: no command that an ACL of the release before did not allow.
if redis.call('HSETNX', KEYS[1], 'claimed', 1) == 0 then
  return 0
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
