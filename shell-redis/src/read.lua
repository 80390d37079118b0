-- Answers one read: a snapshot, since nothing runs beside a script.
local ask = cmsgpack.unpack(ARGV[1])
local records, slices, counts, members, log, scan = ask[1], ask[2], ask[3], ask[4], ask[5], ask[6]
local reply = { clock_text, 0 }
local n = 2
local function put(value)
  n = n + 1
  reply[n] = value
end

-- Strings in the order of their bytes; Lua's own comparison follows the server's locale.
local function less(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = byte(a, i), byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

-- The rank of the first entry after (score, member).
local function rank_after(key, score, member)
  local own = call('ZSCORE', key, member)
  if own and tonumber(own) == tonumber(score) then
    return call('ZRANK', key, member) + 1
  end
  local low = call('ZCOUNT', key, '-inf', '(' .. score)
  local high = low + call('ZCOUNT', key, score, score)
  while low < high do
    local middle = floor((low + high) / 2)
    if less(member, call('ZRANGE', key, middle, middle)[1]) then high = middle else low = middle + 1 end
  end
  return low
end

budget(ask[7])
for i = 1, #records do
  put(give(records[i]))
end

for i = 1, #slices do
  local key, score, member, up_to, limit, prefixes = unpack(slices[i], 1, 6)
  if up_to == true then up_to = clock_text end
  local size = try('ZCARD', key)
  if is_error(size) then
    damage(key)
    size = 0
  end
  local found = {}
  if size > 0 and limit > 0 then
    local from = 0
    if score then from = rank_after(key, score, member) end
    local to = from + limit - 1
    if up_to then to = math.min(to, call('ZCOUNT', key, '-inf', up_to) - 1) end
    if from <= to then found = call('ZRANGE', key, from, to, 'WITHSCORES') end
  end
  put(#found / 2)
  for at = 1, #found, 2 do
    put(found[at])
    put(found[at + 1])
    for p = 1, #prefixes do
      put(give(prefixes[p] .. found[at]))
    end
  end
end

for i = 1, #counts, 2 do
  local count
  if counts[i + 1] then
    count = try('ZCOUNT', counts[i], '(' .. clock_text, '+inf')
  else
    count = try('ZCARD', counts[i])
  end
  if is_error(count) then
    damage(counts[i])
    count = 0
  end
  put(count)
end

for i = 1, #members, 2 do
  local score = try('ZSCORE', members[i], members[i + 1])
  if is_error(score) then
    damage(members[i])
    score = false
  end
  put(score)
  if score then put(call('ZRANK', members[i], members[i + 1])) end
end

if log then
  local found = try('XRANGE', log[1], log[2], '+', 'COUNT', log[3])
  if is_error(found) then
    damage(log[1])
    found = {}
  end
  put(#found)
  for i = 1, #found do
    put(found[i][1])
    put(found[i][2][2])
  end
end

if scan then
  -- A few pages at once, since one may hold nothing but other keys.
  local cursor, found = scan[1], {}
  for _ = 1, 8 do
    local page = call('SCAN', cursor, 'MATCH', KEYS[1] .. 'r:*', 'COUNT', scan[2])
    cursor, found = page[1], page[2]
    if #found > 0 or cursor == '0' then break end
  end
  put(cursor)
  put(#found)
  for i = 1, #found do put(found[i]) end
end

if #damaged > 0 then reply[2] = damaged end
return reply
