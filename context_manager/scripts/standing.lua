-- Put behind arguments.lua: whether a row can be understood, and where in its life it is.

local function row_of(flat)
  if #flat == 0 then
    return nil
  end
  local row = {}
  for i = 1, #flat, 2 do
    row[flat[i]] = flat[i + 1]
  end
  return row
end

local function is_number(text)
  return text and #text <= 15 and string.find(text, '^%d+$')
end

local KINDS = {
  tombstone = {'created_at_ms', 'expires_at_ms'},
  creating = {'created_at_ms', 'expires_at_ms', 'ttl_s', 'generation', 'num_segments', 'lease_until_ms'},
}
KINDS.ready = KINDS.creating

-- Returns whether a row can be understood: nothing is computed with, or written to, one that is damaged.
local function is_whole(row)
  for _, name in ipairs(KINDS[row.state] or {'state'}) do
    if not is_number(row[name]) then
      return false
    end
  end
  return true
end

local function due_at_ms(row)
  if row.state == 'creating' then
    return tonumber(row.lease_until_ms)
  end
  return tonumber(row.expires_at_ms)
end

-- Returns 'absent', 'damaged', 'expired', 'creating' or 'live'.
local function standing(row, now_ms, tombstone_ms)
  if not row then
    return 'absent'
  end
  if not is_whole(row) then
    return 'damaged'
  end
  if row.state == 'creating' and tonumber(row.lease_until_ms) <= now_ms then
    return 'absent'
  end
  local expires_at_ms = tonumber(row.expires_at_ms)
  if row.state == 'tombstone' or expires_at_ms <= now_ms then
    if now_ms < expires_at_ms + tombstone_ms then
      return 'expired'
    end
    return 'absent'
  end
  if row.state == 'creating' then
    return 'creating'
  end
  return 'live'
end

local function is_there(where)
  return where == 'creating' or where == 'live'
end
