-- Takes the due sessions among the candidates of one shard, so that each is taken once whoever else sweeps.
-- KEYS[1] expiry set, then session, transcript and tenant set of each candidate;
-- ARGV[1] now_ms, ARGV[2] tombstone_ms, then member of the expiry set and session id of each candidate.
-- Answers a flat list: member, 'expired' or 'abandoned', ...
local now_ms, tombstone_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
local taken = {}
for i = 0, (#KEYS - 1) / 3 - 1 do
  local session, transcript, tenant = KEYS[2 + 3 * i], KEYS[3 + 3 * i], KEYS[4 + 3 * i]
  local member, id = ARGV[3 + 2 * i], ARGV[4 + 2 * i]
  local score = redis.call('ZSCORE', KEYS[1], member)
  local row = score and tonumber(score) <= now_ms and read_row(session) or nil
  if score and tonumber(score) <= now_ms and (not row or row.state == 'tombstone') then
    redis.call('ZREM', KEYS[1], member)
    redis.call('ZREM', tenant, id)
  elseif row and due_at_ms(row) > now_ms then
    redis.call('ZADD', KEYS[1], integer(due_at_ms(row)), member)
  elseif row then
    redis.call('ZREM', KEYS[1], member)
    redis.call('ZREM', tenant, id)
    redis.call('UNLINK', transcript)
    redis.call('DEL', session)
    taken[#taken + 1] = member
    taken[#taken + 1] = row.state == 'creating' and 'abandoned' or 'expired'
    local remembered_ms = tonumber(row.expires_at_ms) + tombstone_ms - now_ms
    if row.state ~= 'creating' and remembered_ms > 0 then
      redis.call('HSET', session, 'state', 'tombstone',
        'created_at_ms', row.created_at_ms, 'expires_at_ms', row.expires_at_ms)
      redis.call('PEXPIRE', session, integer(remembered_ms))
    end
  end
end
return taken
