-- The namespace's own record: made if there is none, and told. ARGV: the format and the shard.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then
  redis.call('HSET', KEYS[1], 'format', ARGV[1], 'shard', ARGV[2])
elseif kind ~= 'hash' then
  return { kind }
end
local found = redis.call('HMGET', KEYS[1], 'format', 'shard')
return { kind, found[1] or '', found[2] or '' }
