-- Applies one commit: transactions in waves. Those of one wave touch nothing that another of them
-- writes, so all their guards come first and their writes go together, as few calls with long lists.
-- A transaction with a take, or one that writes the same thing twice, has a wave of its own.
--
-- The shell has put each kind of write in columns, with the transaction that each belongs to beside
-- it (`own`); these are looked at only if some transaction of the wave was refused.
local ask = cmsgpack.unpack(ARGV[1])
local sets, expiries, scores, logs, topics, waves, keep_log = unpack(ask, 1, 7)

-- Kinds: 0 a number, 1 the clock plus so much, 2 never.
local heads, expiry_bytes, ttls = {}, {}, {}
do
  local at = pack('>I8', clock)
  for i = 1, #expiries, 2 do
    local e = (i + 1) / 2
    if expiries[i] == 2 then
      expiry_bytes[e], ttls[e] = NEVER, false
    else
      local when = expiries[i + 1]
      if expiries[i] == 1 then when = math.min(clock + when, SCORE_MAX) end
      expiry_bytes[e] = pack('>I8', when)
      -- The server's own expiry only collects garbage, a minute later. It follows the server's
      -- clock, so it means nothing beside a clock that was given.
      ttls[e] = not frozen and text(math.ceil(when / 1000) + 60000)
    end
    heads[e] = at .. expiry_bytes[e]
  end
  for i = 1, #scores, 2 do
    local s = (i + 1) / 2
    if scores[i] == 1 then
      scores[s] = text(math.min(clock + scores[i + 1], SCORE_MAX))
    else
      scores[s] = text(scores[i + 1])
    end
  end
end

-- Nothing is written before every key that will be is known to be of its type: a script that fails
-- half-way is not rolled back.
local bad_sets, bad_logs
for i = 1, #sets do
  if is_error(try('ZCARD', sets[i])) then
    bad_sets = bad_sets or {}
    bad_sets[i] = true
    damage(sets[i])
  end
end
for i = 1, #logs do
  if is_error(try('XLEN', logs[i])) then
    bad_logs = bad_logs or {}
    bad_logs[i] = true
    damage(logs[i])
  end
end

-- Answers that are not simply "applied": -1 empty, -2 too late, -3 damaged, n > 0 refused by the
-- n-th guard, a table for what was taken.
local answers = {}
local told, log_items, log_from = {}, {}, {}
for i = 1, #logs do log_items[i], log_from[i] = {}, {} end

local function log_append(log, item, position)
  local items = log_items[log]
  items[#items + 1] = item
  log_from[log][#items] = position
end

local function set_record(key, e, rest)
  if ttls[e] then
    call('SET', key, heads[e] .. rest, 'PXAT', ttls[e])
  else
    call('SET', key, heads[e] .. rest)
  end
end

local function set_expiry(key, e)
  local now = try('GETRANGE', key, '8', '15')
  if type(now) ~= 'string' or #now < 8 then return end
  if byte(now, 1) ~= 255 and unpack8('>I8', now) <= clock then return end
  call('SETRANGE', key, '8', expiry_bytes[e])
  if ttls[e] then
    call('PEXPIREAT', key, ttls[e])
  elseif byte(now, 1) ~= 255 then
    call('PERSIST', key)
  end
end

local function kept(list, own, step, failed)
  local out, n = {}, 0
  for i = 1, #own do
    if not failed[own[i]] then
      for j = (i - 1) * step + 1, i * step do
        n = n + 1
        out[n] = list[j]
      end
    end
  end
  return out
end

-- Which transactions of the wave are refused, and why; nothing if none is.
local function refused(wave)
  local failed
  local function fail(txn, code)
    failed = failed or {}
    local now = failed[txn]
    -- Too late goes before all; of the guards the first counts.
    if now == nil or code < now then failed[txn] = code end
  end
  local until_, earliest = wave[2], wave[3]
  if clock > earliest then
    for i = 1, #until_ do
      if clock > until_[i] then fail(i, -2) end
    end
  end
  local keys, versions = wave[4], wave[5]
  if #keys > 0 then
    local found = call_list('MGET', keys)
    for i = 1, #keys do
      local record = found[i]
      local version = versions[i]
      local holds
      if not record or #record < HEAD or expired(record) then
        holds = not version
      else
        holds = version and sub(record, 17, HEAD) == version
      end
      if not holds then fail(wave[6][i], wave[7][i]) end
    end
  end
  local others = wave[8]
  for i = 1, #others do
    local own, at, kind, set, value = unpack(others[i], 1, 5)
    local key = sets[set]
    local holds
    if bad_sets and bad_sets[set] then
      holds = false
    elseif kind == 1 then
      holds = not call('ZSCORE', key, value)
    elseif kind == 2 then
      holds = call('ZRANGE', key, 0, 0)[1] == value
    elseif kind == 3 then
      local score = call('ZSCORE', key, value)
      holds = score and tonumber(score) > clock
    elseif kind == 4 then
      local score = call('ZSCORE', key, value)
      holds = score and tonumber(score) <= clock
    elseif kind == 5 then
      holds = call('ZCARD', key) < value
    else
      holds = call('ZCOUNT', key, '(' .. clock_text, '+inf') < value
    end
    if not holds then fail(own, at) end
  end
  if bad_sets or bad_logs then
    -- What touches a damaged key is refused as a whole.
    local function check(bad, index, own)
      if not bad or not bad[index] then return end
      for i = 1, #own do fail(own[i], -3) end
    end
    if wave[12] then
      for i = 1, #wave[9] do check(bad_sets, wave[9][i], { 1 }) end
      for i = 1, #wave[10] do check(bad_logs, wave[10][i], { 1 }) end
    else
      local _, _, _, adds, removes, appends, _, of = unpack(wave[11], 1, 8)
      for i = 1, #adds do check(bad_sets, adds[i][1], adds[i][4]) end
      for i = 1, #removes do check(bad_sets, removes[i][1], removes[i][3]) end
      for i = 1, #appends do check(bad_logs, appends[i][1], appends[i][3]) end
      for i = 1, #of do
        check(bad_sets, of[i][2], { of[i][1] })
        check(bad_sets, of[i][4], { of[i][1] })
      end
    end
  end
  return failed
end

local function grouped(wave, failed)
  local positions = wave[1]
  local puts, dels, expires, adds, removes, appends, tells, of = unpack(wave[11], 1, 8)
  -- Scores "before this transaction" are looked up before anything is written.
  local before = {}
  for i = 1, #of do
    if not failed or not failed[of[i][1]] then
      before[i] = call('ZSCORE', sets[of[i][4]], of[i][3]) or clock_text
    end
  end
  for i = 1, #puts do
    local e, list, own = puts[i][1], puts[i][2], puts[i][3]
    if failed then list = kept(list, own, 2, failed) end
    if #list > 0 then
      local head, ttl = heads[e], ttls[e]
      if ttl then
        for j = 1, #list, 2 do
          call('SET', list[j], head .. list[j + 1], 'PXAT', ttl)
        end
      else
        for j = 2, #list, 2 do list[j] = head .. list[j] end
        call_list('MSET', list)
      end
    end
  end
  if #dels[1] > 0 then
    local list = dels[1]
    if failed then list = kept(list, dels[2], 1, failed) end
    if #list > 0 then call_list('DEL', list) end
  end
  local list = expires[1]
  for i = 1, #list, 2 do
    if not failed or not failed[expires[2][(i + 1) / 2]] then set_expiry(list[i], list[i + 1]) end
  end
  for i = 1, #adds do
    local set, raise, members, own = unpack(adds[i], 1, 4)
    if failed then members = kept(members, own, 2, failed) end
    if #members > 0 then
      for j = 1, #members, 2 do members[j] = scores[members[j]] end
      if raise then
        for j = 1, #members, MANY do
          call('ZADD', sets[set], 'GT', unpack(members, j, math.min(j + MANY - 1, #members)))
        end
      else
        call_key_list('ZADD', sets[set], members)
      end
    end
  end
  for i = 1, #of do
    local own, set, member, _, raise = unpack(of[i], 1, 5)
    if not failed or not failed[own] then
      if raise then
        call('ZADD', sets[set], 'GT', before[i], member)
      else
        call('ZADD', sets[set], before[i], member)
      end
    end
  end
  for i = 1, #removes do
    local members = removes[i][2]
    if failed then members = kept(members, removes[i][3], 1, failed) end
    if #members > 0 then call_key_list('ZREM', sets[removes[i][1]], members) end
  end
  for i = 1, #appends do
    local log, items, own = appends[i][1], appends[i][2], appends[i][3]
    for j = 1, #items do
      if not failed or not failed[own[j]] then log_append(log, items[j], positions[own[j]]) end
    end
  end
  for i = 1, #tells do
    local own = tells[i][2]
    for j = 1, #own do
      if not failed or not failed[own[j]] then
        told[tells[i][1]] = true
        break
      end
    end
  end
end

-- Postcard's encoding of what was taken: the core reads it.
local function varint(n)
  local out = ''
  while n >= 128 do
    local low = n % 128
    out = out .. string.char(low + 128)
    n = (n - low) / 128
  end
  return out .. string.char(n)
end

local function encode_taken(taken)
  local out = { varint(#taken) }
  for i = 1, #taken do
    local t = taken[i]
    out[#out + 1] = varint(t[1]) .. varint(#t[2]) .. t[2] .. varint(tonumber(t[3]))
  end
  return table.concat(out)
end

-- The first n members over the sources: { source from 0, member, score }.
local function choose(take)
  local taken = {}
  for s = 1, #take[2] do
    local want = take[1] - #taken
    if want <= 0 then break end
    local set, due = take[2][s][1], take[2][s][2]
    local found
    if due then
      found = call('ZRANGEBYSCORE', sets[set], '-inf', clock_text, 'WITHSCORES', 'LIMIT', 0, want)
    else
      found = call('ZRANGE', sets[set], 0, want - 1, 'WITHSCORES')
    end
    for i = 1, #found, 2 do
      taken[#taken + 1] = { s - 1, found[i], found[i + 1] }
    end
  end
  return taken
end

-- The writes of one source for some of its members; `before` has the scores looked up.
local function each(source, members, own_scores, before)
  local set, _, writes = unpack(source, 1, 3)
  call_key_list('ZREM', sets[set], members)
  for w = 1, #writes do
    local write = writes[w]
    local kind = write[1]
    if kind == 1 or kind == 2 then
      local list = {}
      for i = 1, #members do
        local score
        if kind == 1 then
          score = scores[write[3]]
        elseif write[3] == set then
          score = own_scores[i]
        else
          score = before[w][i]
        end
        list[2 * i - 1], list[2 * i] = score, members[i]
      end
      call_key_list('ZADD', sets[write[2]], list)
    elseif kind == 3 then
      call_key_list('ZREM', sets[write[2]], members)
    elseif kind == 4 then
      local prefix, e = write[2], write[3]
      local value, ttl = heads[e] .. write[4], ttls[e]
      if ttl then
        for i = 1, #members do call('SET', prefix .. members[i], value, 'PXAT', ttl) end
      else
        local list = {}
        for i = 1, #members do list[2 * i - 1], list[2 * i] = prefix .. members[i], value end
        call_list('MSET', list)
      end
    else
      local list = {}
      for i = 1, #members do list[i] = write[2] .. members[i] end
      call_list('DEL', list)
    end
  end
end

-- A transaction by itself: returns what was taken as the reply has it, or its answer.
local function single(wave)
  local position, take, writes = wave[1][1], wave[11], wave[12]
  local before = {}
  for i = 1, #writes do
    if writes[i][1] == 7 then
      before[i] = call('ZSCORE', sets[writes[i][4]], writes[i][3]) or clock_text
    end
  end
  local taken, answer = {}, 0
  if take then
    taken = choose(take)
    if #taken == 0 then return -1 end
    budget(take[4])
    answer = { #taken }
    local prefixes = take[3]
    for i = 1, #taken do
      local t = taken[i]
      answer[#answer + 1], answer[#answer + 2], answer[#answer + 3] = t[1], t[2], t[3]
      for p = 1, #prefixes do answer[#answer + 1] = give(prefixes[p] .. t[2]) end
    end
    local sources = take[2]
    local members, own_scores, looked_up = {}, {}, {}
    for s = 1, #sources do members[s], own_scores[s], looked_up[s] = {}, {}, {} end
    for i = 1, #taken do
      local s = taken[i][1] + 1
      members[s][#members[s] + 1] = taken[i][2]
      own_scores[s][#own_scores[s] + 1] = taken[i][3]
    end
    for s = 1, #sources do
      local source = sources[s]
      if #members[s] > 0 then
        for w = 1, #source[3] do
          local write = source[3][w]
          if write[1] == 2 and write[3] ~= source[1] then
            local found = call_key_list('ZMSCORE', sets[write[3]], members[s])
            for i = 1, #found do found[i] = found[i] or clock_text end
            looked_up[s][w] = found
          end
        end
      end
    end
    for s = 1, #sources do
      if #members[s] > 0 and not take[5] then
        each(sources[s], members[s], own_scores[s], looked_up[s])
      else
        -- Names that one member makes under one prefix may be another's under another.
        for i = 1, #members[s] do
          local one = {}
          for w, found in pairs(looked_up[s]) do one[w] = { found[i] } end
          each(sources[s], { members[s][i] }, { own_scores[s][i] }, one)
        end
      end
    end
  end
  local encoded
  for i = 1, #writes do
    local kind, a, b, c, d = unpack(writes[i], 1, 5)
    if kind == 1 then
      set_record(a, b, c)
    elseif kind == 2 then
      encoded = encoded or encode_taken(taken)
      set_record(a, b, c .. encoded)
    elseif kind == 3 then
      call('DEL', a)
    elseif kind == 4 then
      set_expiry(a, b)
    elseif kind == 5 then
      call('ZADD', sets[a], scores[c], b)
    elseif kind == 6 then
      call('ZADD', sets[a], 'GT', scores[c], b)
    elseif kind == 7 then
      if d then
        call('ZADD', sets[a], 'GT', before[i], b)
      else
        call('ZADD', sets[a], before[i], b)
      end
    elseif kind == 8 then
      call('ZREM', sets[a], b)
    elseif kind == 9 then
      encoded = encoded or (take and encode_taken(taken)) or ''
      log_append(a, b .. pack('>I4', #encoded) .. encoded, position)
    else
      told[a] = true
    end
  end
  return answer
end

local plain = true
for w = 1, #waves do
  local wave = waves[w]
  local failed = refused(wave)
  if wave[12] then
    local answer
    if failed then answer = failed[1] else answer = single(wave) end
    if answer ~= 0 then
      answers[wave[1][1]] = answer
      plain = false
    end
  else
    if failed then
      plain = false
      for txn, code in pairs(failed) do answers[wave[1][txn]] = code end
    end
    grouped(wave, failed)
  end
end

for i = 1, #logs do
  local items, from = log_items[i], log_from[i]
  if #items > 0 then
    -- In the order of the transactions, whichever wave they were in.
    local sorted = true
    for j = 2, #items do
      if from[j] < from[j - 1] then
        sorted = false
        break
      end
    end
    if not sorted then
      local order, by_order = {}, {}
      for j = 1, #items do order[j] = j end
      table.sort(order, function(a, b)
        if from[a] ~= from[b] then return from[a] < from[b] end
        return a < b
      end)
      for j = 1, #items do by_order[j] = items[order[j]] end
      items = by_order
    end
    call('XADD', logs[i], 'MAXLEN', '~', keep_log, '0-*', 'e', pack('>I8', clock) .. table.concat(items))
  end
end

local message
for topic in pairs(told) do
  message = message or { ARGV[3] }
  message[#message + 1] = pack('>I4', #topics[topic]) .. topics[topic]
end
if message then call('PUBLISH', KEYS[1] .. 'n', table.concat(message)) end

local reply = { clock_text, 0 }
if #damaged > 0 then reply[2] = damaged end
if not plain then
  for i = 1, ask[8] do reply[i + 2] = answers[i] or 0 end
end
return reply
