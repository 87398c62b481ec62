-- Takes the due sessions among the candidates of one shard. Each is taken once, however many managers sweep. Sessions that
-- are not due get the score and the end that their rows ask for; damaged ones are set aside.
-- KEYS[1] expiry set, then session, transcript, tenant set, ledger, last turns and place in lists of each candidate;
-- a.names: member of the expiry set and session id of each candidate.
-- Answers a flat list: member, 'expired', 'abandoned' or 'damaged', ...
local expiry = KEYS[1]
local taken = {}

-- Returns the row, nil where there is none, false for one that cannot be understood.
local function row_to_judge(session)
  local kind = redis.call('TYPE', session).ok
  if kind == 'none' then
    return nil
  elseif kind ~= 'hash' then
    return false
  end
  local row = read_row(session)
  return is_whole(row) and row
end

-- Nobody can use it, and perhaps somebody can mend it: it stays until its own end.
local function set_aside(keys)
  for _, key in ipairs(keys) do
    if redis.call('PTTL', key) == -1 then
      redis.call('PEXPIRE', key, integer(tombstone_ms + GRACE_MS))
    end
  end
  return 'damaged'
end

local function bury(session, transcript, ledger, turns, place, row)
  redis.call('UNLINK', session, transcript, turns)
  release_trunks(transcript, ledger, row, now_ms)
  uncount_row(ledger, row, now_ms)
  if row.state == 'creating' then
    remember_place(place, ledger, row.created_at_ms, now_ms, tombstone_ms)
    return 'abandoned'
  end
  local remembered_ms = tonumber(row.expires_at_ms) + tombstone_ms - now_ms
  if remembered_ms > 0 then
    redis.call('HSET', session, 'state', 'tombstone',
      'created_at_ms', row.created_at_ms, 'expires_at_ms', row.expires_at_ms)
    redis.call('PEXPIRE', session, integer(remembered_ms))
    add_bytes(ledger, now_ms + remembered_ms, PLACE_BYTES, now_ms)
    keep_ledger(ledger, remembered_ms)
  end
  return 'expired'
end

local function take(session, transcript, tenant, ledger, turns, place, member, id)
  local row = row_to_judge(session)
  if row and row.state ~= 'tombstone' and due_at_ms(row) > now_ms then
    enter({session, transcript, expiry, tenant}, member, id, row, now_ms, tombstone_ms)
    count_row(session, transcript, ledger, row, now_ms, keep_ms(due_at_ms(row), now_ms, tombstone_ms))
    return
  end
  redis.call('ZREM', expiry, member)
  redis.pcall('ZREM', tenant, id)
  local fate = nil
  if row == false then
    fate = set_aside({session, transcript})
  elseif row and row.state ~= 'tombstone' then
    fate = bury(session, transcript, ledger, turns, place, row)
  end
  if fate then
    taken[#taken + 1] = member
    taken[#taken + 1] = fate
  end
end

for i = 0, (#KEYS - 1) / 6 - 1 do
  local session, transcript, tenant, ledger, turns, place = unpack(KEYS, 2 + 6 * i, 7 + 6 * i)
  local member, id = unpack(a.names, 1 + 2 * i, 2 + 2 * i)
  -- Without a score another sweep, or a delete, was faster.
  if redis.call('ZSCORE', expiry, member) then
    take(session, transcript, tenant, ledger, turns, place, member, id)
  end
end
return taken
