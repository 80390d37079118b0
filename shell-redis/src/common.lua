-- What both scripts share. KEYS[1] is the shard's prefix, ARGV[1] the question, ARGV[2] a clock to
-- use instead of the server's, or nothing.
--
-- A record is a string: clock of its put, expiry, version, eight bytes each, big-endian; then its
-- bytes. An expiry of eight times 255 is never.
local call, try = redis.call, redis.pcall
local byte, sub, format, floor = string.byte, string.sub, string.format, math.floor
local pack, unpack8 = struct.pack, struct.unpack
local HEAD = 24
local NEVER = string.rep('\255', 8)
local SCORE_MAX = 9007199254740991
-- Arguments of one call; Lua's stack takes 8,000.
local MANY = 6000

local clock
local frozen = ARGV[2] ~= ''
if frozen then
  clock = tonumber(ARGV[2])
else
  local t = call('TIME')
  clock = tonumber(t[1]) * 1000000 + tonumber(t[2])
end
-- Numbers become text by a format only: by itself Lua keeps fourteen digits.
local function text(n)
  return format('%.0f', n)
end
local clock_text = text(clock)

-- Keys whose type or shape is not what was written there.
local damaged = {}
local function damage(key)
  damaged[#damaged + 1] = key
end

local function is_error(reply)
  return type(reply) == 'table' and reply.err ~= nil
end

local function expired(record)
  return byte(record, 9) ~= 255 and unpack8('>I8', record, 9) <= clock
end

-- Records within a budget of bytes: the whole string, 0 for absent, or head and length of one that
-- was left unread. The first is always given whole.
local PROBE, PROBE_END, HEAD_END = 8192, '8191', '23'
local left, first
local function budget(n)
  left, first = n, true
end
local function give(key)
  -- Numbers are given as text, which the server need not make of them.
  local seen, last = PROBE, PROBE_END
  if left == 0 and not first then seen, last = HEAD, HEAD_END end
  local record = try('GETRANGE', key, '0', last)
  if record == '' then return 0 end
  if type(record) ~= 'string' or #record < HEAD then
    damage(key)
    return 0
  end
  if expired(record) then return 0 end
  local len = #record - HEAD
  if #record == seen then len = call('STRLEN', key) - HEAD end
  if first or len <= left then
    if len > #record - HEAD then record = call('GET', key) end
    left = math.max(left - len, 0)
    first = false
    return record
  end
  left = 0
  return { sub(record, 1, HEAD), len }
end

-- A call with a long list, in pieces; `ask` makes one of a piece.
local function in_pieces(list, ask)
  local n = #list
  if n <= MANY then return ask(unpack(list)) end
  local out
  for from = 1, n, MANY do
    local part = ask(unpack(list, from, math.min(from + MANY - 1, n)))
    if out == nil then
      out = part
    elseif type(part) == 'table' then
      for i = 1, #part do out[#out + 1] = part[i] end
    end
  end
  return out
end
local function call_list(command, list)
  return in_pieces(list, function(...) return call(command, ...) end)
end
local function call_key_list(command, key, list)
  return in_pieces(list, function(...) return call(command, key, ...) end)
end
