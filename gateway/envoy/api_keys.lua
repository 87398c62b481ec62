-- Refuses a request without a known API key, by the rules of `gateway/tenants/keys.py`. `keys.py` puts constants before
-- this text: DIGESTS (SHA-256 of all keys in hex, sorted, without separators), LONGEST (bytes of the longest key that is
-- checked), and the parts of a refusal: AUTHENTICATE, MISSING, UNKNOWN, FAILED.

local bit = require("bit")
local band, bnot, bxor, ror, shr, tobit, tohex = bit.band, bit.bnot, bit.bxor, bit.ror, bit.rshift, bit.tobit, bit.tohex
local byte, char, floor, rep, sub = string.byte, string.char, math.floor, string.rep, string.sub

local KEY_BYTES_MAX = tonumber(LONGEST)
local DIGEST_CHARS = 64

-- FIPS 180-4: the first 32 bits of the fractions of the first primes' cube and square roots.
local ROUND, INITIAL = {}, {}
do
  local function fraction(x)
    return tobit(floor((x - floor(x)) * 4294967296))
  end
  local number = 2
  while #ROUND < 64 do
    local is_prime = true
    for divisor = 2, floor(math.sqrt(number)) do
      is_prime = is_prime and number % divisor ~= 0
    end
    if is_prime then
      ROUND[#ROUND + 1] = fraction(number ^ (1 / 3))
      INITIAL[#INITIAL + 1] = fraction(number ^ (1 / 2))
    end
    number = number + 1
  end
end

local function padded(text)
  local size = #text
  local bits = char(band(shr(size, 13), 255), band(shr(size, 5), 255), band(size * 8, 255))
  return text .. "\128" .. rep("\0", (55 - size) % 64 + 5) .. bits
end

local words = {}

-- Spreads the block that begins at `start` over 64 words.
local function schedule(text, start)
  for i = 1, 16 do
    local a, b, c, d = byte(text, start + 4 * i - 4, start + 4 * i - 1)
    words[i] = tobit(a * 16777216 + b * 65536 + c * 256 + d)
  end
  for i = 17, 64 do
    local x, y = words[i - 15], words[i - 2]
    local left, right = bxor(ror(x, 7), ror(x, 18), shr(x, 3)), bxor(ror(y, 17), ror(y, 19), shr(y, 10))
    words[i] = tobit(words[i - 16] + left + words[i - 7] + right)
  end
end

local function compressed(a, b, c, d, e, f, g, h)
  for i = 1, 64 do
    local left = h + bxor(ror(e, 6), ror(e, 11), ror(e, 25)) + bxor(band(e, f), band(bnot(e), g)) + ROUND[i] + words[i]
    local right = bxor(ror(a, 2), ror(a, 13), ror(a, 22)) + bxor(band(a, b), band(a, c), band(b, c))
    h, g, f, e, d, c, b, a = g, f, e, tobit(d + left), c, b, a, tobit(left + right)
  end
  return a, b, c, d, e, f, g, h
end

local function sha256(text)
  local whole = padded(text)
  local h1, h2, h3, h4, h5, h6, h7, h8 = unpack(INITIAL, 1, 8)
  for start = 1, #whole, 64 do
    schedule(whole, start)
    local a, b, c, d, e, f, g, h = compressed(h1, h2, h3, h4, h5, h6, h7, h8)
    h1, h2, h3, h4 = tobit(h1 + a), tobit(h2 + b), tobit(h3 + c), tobit(h4 + d)
    h5, h6, h7, h8 = tobit(h5 + e), tobit(h6 + f), tobit(h7 + g), tobit(h8 + h)
  end
  return tohex(h1) .. tohex(h2) .. tohex(h3) .. tohex(h4) .. tohex(h5) .. tohex(h6) .. tohex(h7) .. tohex(h8)
end

-- The duration reveals nothing about a key, because hashes are compared.
local function is_known(digest)
  local low, high = 0, #DIGESTS / DIGEST_CHARS - 1
  while low <= high do
    local middle = floor((low + high) / 2)
    local found = sub(DIGESTS, middle * DIGEST_CHARS + 1, (middle + 1) * DIGEST_CHARS)
    if found == digest then
      return true
    elseif found < digest then
      low = middle + 1
    else
      high = middle - 1
    end
  end
  return false
end

-- Returns nil without such a header, and an empty key if the header is repeated or holds no key.
local function key_in(headers, name, scheme)
  local count = headers:getNumValues(name)
  if count == 0 then
    return nil
  end
  local text = count == 1 and headers:get(name) or ""
  if scheme then
    local found, rest = text:match("^([^ ]*) (.*)$")
    text = found and found:lower() == scheme and rest or ""
  end
  return text:match("^%s*(.-)%s*$")
end

-- Returns the body of a 401, or nil if the key is known. Two headers must hold the same key.
local function refusal(headers)
  local bearer, own = key_in(headers, "authorization", "bearer"), key_in(headers, "x-api-key")
  local key = bearer or own or ""
  -- Envoy joins repeated headers by a comma.
  if (key == "" and (own or "") == "") or key:find(",", 1, true) then
    return MISSING
  elseif (own or key) ~= key or #key > KEY_BYTES_MAX or not is_known(sha256(key)) then
    return UNKNOWN
  end
  return nil
end

function envoy_on_request(handle)
  -- Envoy forwards a request whose script fails.
  local is_checked, found = pcall(refusal, handle:headers())
  if not is_checked then
    handle:logErr("the API key could not be checked")
    handle:respond({[":status"] = "500", ["content-type"] = "application/json"}, FAILED)
  elseif found then
    local headers = {
      [":status"] = "401",
      ["content-type"] = "application/json",
      ["www-authenticate"] = AUTHENTICATE,
    }
    handle:respond(headers, found)
  end
end
