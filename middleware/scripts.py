"""What happens in Redis, as Lua scripts on Dramatiq's own layout of keys.

Each script is safe to repeat: a call whose answer was lost is simply made again. Each begins with
a write that a full Redis allows (removing nothing), because Redis then lets the rest of the script
through; else nobody could drain it (T33). The time is Redis's (T14).

    namespace:queue            list of ids, the next one first
    namespace:queue.msgs       hash of id -> encoded message
    namespace:queue.XQ         sorted set of dead ids by time, queue.XQ.msgs their messages
    namespace:__acks__.W.queue set of ids that worker W has in hand
    namespace:__heartbeats__   sorted set of workers by the time of their last sign of life
"""

from __future__ import annotations

_PREAMBLE = """
local ns = KEYS[1]
local heartbeats = ns .. ":__heartbeats__"
local function now()
  local t = redis.call("time")
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function base_of(queue)
  if string.sub(queue, -3) == ".DQ" then return string.sub(queue, 1, -4) end
  return queue
end
-- Puts an id back at the end of its queue if its message is still there.
local function put_back(queue, id)
  if redis.call("hexists", ns .. ":" .. queue .. ".msgs", id) == 1 then
    redis.call("rpush", ns .. ":" .. queue, id)
    return 1
  end
  return 0
end
-- Puts back all that a worker has in hand, and forgets the worker.
local function sweep(worker)
  local prefix = ns .. ":__acks__." .. worker .. "."
  local pattern = string.gsub(prefix, "[%*%?%[%]%^\\\\]", "\\\\%0") .. "*"
  local count = 0
  for _, key in ipairs(redis.call("keys", pattern)) do
    for _, id in ipairs(redis.call("smembers", key)) do
      redis.call("srem", key, id)
      count = count + put_back(string.sub(key, #prefix + 1), id)
    end
  end
  redis.call("zrem", heartbeats, worker)
  return count
end
"""

#: Adds a message to a queue, once for each id.
#: ARGV: queue, id, message
ENQUEUE = """
local list = ns .. ":" .. ARGV[1]
if redis.call("hsetnx", list .. ".msgs", ARGV[2], ARGV[3]) == 1 then
  redis.call("rpush", list, ARGV[2])
end
"""

#: Everything that a consumer has to say and to ask, in one round trip.
#: ARGV: queue, worker, how many messages are wanted, then the numbers of ids that are
#: acknowledged, dead and given back, then these ids.
#: Returns the ids and the messages that the worker now has in hand.
EXCHANGE = """
local queue, worker, wanted = ARGV[1], ARGV[2], tonumber(ARGV[3])
local list = ns .. ":" .. queue
local messages = list .. ".msgs"
local hand = ns .. ":__acks__." .. worker .. "." .. queue
local graveyard = ns .. ":" .. base_of(queue) .. ".XQ"
redis.call("srem", hand, "")
local at = 6
local function take(count)
  local ids = {}
  for i = 1, tonumber(count) do ids[i] = ARGV[at + i] end
  at = at + #ids
  return ids
end

local acks = take(ARGV[4])
if #acks > 0 then
  redis.call("srem", hand, unpack(acks))
  redis.call("hdel", messages, unpack(acks))
end
for _, id in ipairs(take(ARGV[5])) do
  local message = redis.call("hget", messages, id)
  redis.call("srem", hand, id)
  if message then
    redis.call("hdel", messages, id)
    redis.call("zadd", graveyard, now(), id)
    redis.call("hset", graveyard .. ".msgs", id, message)
  end
end
for _, id in ipairs(take(ARGV[6])) do
  if redis.call("srem", hand, id) == 1 then put_back(queue, id) end
end

local ids = wanted > 0 and redis.call("lpop", list, wanted)
if not ids then return {{}, {}} end
redis.call("sadd", hand, unpack(ids))
-- A worker that is killed before its first beat must be found by the sweep too (T14).
redis.call("zadd", heartbeats, "NX", now(), worker)
return {ids, redis.call("hmget", messages, unpack(ids))}
"""

#: The sign of life of a worker, and with it the search for workers that gave none.
#: A worker sweeps only when its own beats were in time for a whole timeout: after Redis was
#: away everybody looks silent (T14).
#: ARGV: worker, timeout in ms, since when its beats were in time ("" at first), how long dead
#: letters are kept in ms, then its queues.
#: Returns since when the beats were in time, and the number of messages put back.
BEAT = """
local worker, timeout, steady, keep = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
redis.call("zrem", heartbeats, "")
local time = now()
local previous = tonumber(redis.call("zscore", heartbeats, worker) or "")
redis.call("zadd", heartbeats, time, worker)
if not steady or not previous or time - previous > timeout then steady = time end
local count = 0
if time - steady >= timeout then
  local silent = redis.call("zrangebyscore", heartbeats, "-inf", time - timeout, "LIMIT", 0, 10)
  for _, other in ipairs(silent) do count = count + sweep(other) end
end
for i = 5, #ARGV do
  local graveyard = ns .. ":" .. ARGV[i] .. ".XQ"
  local expired = redis.call("zrangebyscore", graveyard, 0, time - keep, "LIMIT", 0, 100)
  if #expired > 0 then
    redis.call("zrem", graveyard, unpack(expired))
    redis.call("hdel", graveyard .. ".msgs", unpack(expired))
  end
end
return {tostring(steady), count}
"""

#: A worker takes its leave: whatever it still has in hand goes back.
#: ARGV: worker
LEAVE = """
return sweep(ARGV[1])
"""

#: Gives rows of the ledger to Redis, each once. A full Redis refuses, as it should.
#: ARGV: how many messages a queue may have, then queue, id and message of each row.
#: Returns for each "ok", "full" or what is wrong with it.
PUBLISH = """
local window = tonumber(ARGV[1])
local answers = {}
for i = 2, #ARGV, 3 do
  local list, id = ns .. ":" .. ARGV[i], ARGV[i + 1]
  local messages = list .. ".msgs"
  local answer = "ok"
  local size = redis.pcall("hlen", messages)
  if type(size) == "table" then answer = size.err
  elseif size >= window and redis.call("hexists", messages, id) == 0 then answer = "full"
  else
    local added = redis.pcall("hsetnx", messages, id, ARGV[i + 2])
    if type(added) == "table" then answer = added.err
    elseif added == 1 then
      local pushed = redis.pcall("rpush", list, id)
      if type(pushed) == "table" then
        redis.call("hdel", messages, id)
        answer = pushed.err
      end
    end
  end
  answers[#answers + 1] = answer
end
return answers
"""

#: Which of these ids has a message. ARGV: queue, ids. Returns 1 or 0 for each.
THERE = """
local messages = ns .. ":" .. ARGV[1] .. ".msgs"
local answers = {}
for i = 2, #ARGV do answers[i - 1] = redis.call("hexists", messages, ARGV[i]) end
return answers
"""

#: Every message is in the list or in some worker's hand; if fewer are, the list was lost, and
#: what is missing is put into it. ARGV: queue. Returns how many were.
REPAIR = """
local list = ns .. ":" .. ARGV[1]
local hands, held = {}, redis.call("llen", list)
for _, worker in ipairs(redis.call("zrange", heartbeats, 0, -1)) do
  hands[#hands + 1] = ns .. ":__acks__." .. worker .. "." .. ARGV[1]
  held = held + redis.call("scard", hands[#hands])
end
if redis.call("hlen", list .. ".msgs") <= held then return 0 end
local known, count = {}, 0
for _, id in ipairs(redis.call("lrange", list, 0, -1)) do known[id] = true end
for _, hand in ipairs(hands) do
  for _, id in ipairs(redis.call("smembers", hand)) do known[id] = true end
end
for _, id in ipairs(redis.call("hkeys", list .. ".msgs")) do
  if not known[id] then
    redis.call("rpush", list, id)
    count = count + 1
  end
end
return count
"""

#: Tells one relay that something is due; one note is enough for all.
WAKE = """
redis.call("lpush", ns .. ":__wake__", "1")
redis.call("ltrim", ns .. ":__wake__", 0, 3)
"""

#: Removes all messages of a queue. ARGV: queue, worker
PURGE = """
local list, base = ns .. ":" .. ARGV[1], ns .. ":" .. base_of(ARGV[1])
local hand = ns .. ":__acks__." .. ARGV[2] .. "." .. ARGV[1]
redis.call("del", list, list .. ".msgs", hand, base .. ".XQ", base .. ".XQ.msgs")
"""

#: How many messages of a queue wait, are delayed or are in hand. ARGV: queue
SIZE = """
local list = ns .. ":" .. base_of(ARGV[1])
return redis.call("hlen", list .. ".msgs") + redis.call("hlen", list .. ".DQ.msgs")
"""

SCRIPTS = {
    name: _PREAMBLE + text
    for name, text in {
        "enqueue": ENQUEUE,
        "exchange": EXCHANGE,
        "beat": BEAT,
        "leave": LEAVE,
        "publish": PUBLISH,
        "there": THERE,
        "repair": REPAIR,
        "wake": WAKE,
        "purge": PURGE,
        "size": SIZE,
    }.items()
}
