//! Once in a while everything that is past its time leaves a pool, also when nobody asks for anything; and
//! what stands in line without a deadline, since that was lost, is taken out.

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::record::Pool;
use super::{counted, tidy};
use crate::codec::Undecodable;
use crate::job::moves::{add, as_read, remove};
use crate::job::record::Class;
use crate::limits;
use crate::name::Name;
use crate::replica::Mark;
use crate::replica::task::{Cx, Draft, Next, Operation, Plan, decode_record};
use crate::request::Response;
use crate::store::{Answer, Clock, Entry, Guard, Read, ScoreAt, Slice, Snapshot, Span, Standing, UpTo, Write, keys};

/// One look at the pools whose turn it is.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Tidy {
    pools: Vec<String>,
    stage: Stage,
    /// The first in each line, to be looked for among those with a deadline.
    heads: Vec<(String, Class, Vec<Entry>)>,
    drafts: Vec<Draft>,
    /// A page was full: there is more.
    pub more: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Stage {
    #[default]
    Due,
    Counts,
    Heads,
}

/// Counts of one pool: All and Live of each index, and the length of each line.
const COUNTS: usize = 2 * (2 + Class::ALL.len()) + Class::ALL.len();

impl Tidy {
    fn counts(&mut self) -> Next {
        self.stage = Stage::Counts;
        let mut read = Read::default();
        for pool in &self.pools {
            read.records.push(keys::pool(pool));
            read.counts.extend(counted(pool).flat_map(|index| [(index.clone(), Span::All), (index, Span::Live)]));
            for class in Class::ALL {
                read.counts.push((keys::waiting(pool, class), Span::All));
                let line = keys::waiting(pool, class);
                let limit = limits::SWEEP_WAITERS;
                read.slices.push(Slice {
                    index: line,
                    after: None,
                    up_to: UpTo::End,
                    limit,
                    give: vec![keys::slots(pool)],
                });
            }
        }
        Next::Read(read)
    }

    fn one(&mut self, pool: &str, snapshot: &Snapshot, at: usize, cx: &mut Cx<'_>) {
        let counts = snapshot.counts.chunks(COUNTS).nth(at).unwrap_or_default();
        let (pairs, lines) = counts.split_at((COUNTS - Class::ALL.len()).min(counts.len()));
        let past: u64 = pairs.chunks(2).map(|pair| if let [all, live] = pair { all - live } else { 0 }).sum();
        let record = snapshot.records.get(at);
        let sparing = snapshot.clock < cx.spare_until;
        let mut next = limits::POOL_IDLE;
        if past > 0 && !sparing {
            self.drafts.extend(tidy(pool));
            if past >= limits::SWEEP_WAITERS as u64 {
                self.more = true;
                next = 0;
            }
        }
        let mut slices = snapshot.slices.iter().skip(at * Class::ALL.len());
        for ((class, line), alive) in Class::ALL.into_iter().zip(lines).zip(pairs.chunks(2).skip(2)) {
            let entries = slices.next();
            // Each who waits has a deadline; where the sizes differ one was lost.
            if alive.first().is_some_and(|alive| line > alive) && !sparing {
                self.heads.push((pool.into(), class, entries.cloned().unwrap_or_default()));
            }
        }
        let member = keys::pool_member(pool);
        let due = Guard::Member(keys::POOLS, member.clone(), Standing::Due);
        let Some(record) = record else { return };
        let gone = match decode_record::<Pool>(record) {
            Ok(found) => found.is_none_or(|(_, pool)| pool.deleted),
            Err(Undecodable::Newer) => {
                cx.mark(Mark::NewerFormat);
                false
            }
            Err(Undecodable::Corrupt) => false,
        };
        let all: u64 = pairs.iter().step_by(2).chain(lines).sum();
        if gone && all == 0 {
            // Its record has vanished, and so has whoever held or waited.
            let guards = vec![due, as_read(keys::pool(pool), record)];
            self.drafts.push(Draft::new(guards, vec![remove(keys::POOLS, &member)]));
        } else {
            self.drafts.push(Draft::new(vec![due], vec![add(keys::POOLS, &member, ScoreAt::Clock(next))]));
        }
    }

    /// Takes those out of the line who have no deadline.
    fn heads(&mut self, snapshot: &Snapshot) {
        let mut places = snapshot.members.iter();
        for (pool, class, entries) in core::mem::take(&mut self.heads) {
            for entry in entries {
                if places.next().is_none_or(Option::is_some) {
                    continue;
                }
                let member = &entry.member;
                let key = keys::slots(&pool).join(member);
                let mut guards = vec![Guard::Member(keys::alive(&pool, class), member.clone(), Standing::Out)];
                guards.extend(entry.records.first().map(|record| as_read(key, record)));
                // It still stands there: what was put back meanwhile has a deadline as well.
                guards.push(Guard::Member(keys::waiting(&pool, class), member.clone(), Standing::Due));
                let topic = keys::topic_pool(&pool);
                let writes = vec![remove(keys::waiting(&pool, class), member), Write::Notify(topic)];
                self.drafts.push(Draft::new(guards, writes));
            }
        }
    }

    fn commit(&mut self) -> Next {
        Next::Commit(Plan::new(core::mem::take(&mut self.drafts)))
    }
}

impl Operation for Tidy {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        *self = Tidy::default();
        let index = keys::POOLS;
        let due = Slice { index, after: None, up_to: UpTo::Clock, limit: limits::SWEEP_POOLS, give: Vec::new() };
        Next::Read(Read { slices: vec![due], ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        match self.stage {
            Stage::Due => {
                let members: Vec<&Name> = snapshot.slices.iter().flatten().map(|e| &e.member).collect();
                self.more = members.len() >= limits::SWEEP_POOLS;
                self.pools = members.into_iter().filter_map(keys::pool_of).collect();
                if self.pools.is_empty() { Next::ok(Response::Ready) } else { self.counts() }
            }
            Stage::Counts => {
                for (at, pool) in core::mem::take(&mut self.pools).iter().enumerate() {
                    self.one(pool, &snapshot, at, cx);
                }
                if self.heads.is_empty() {
                    return self.commit();
                }
                self.stage = Stage::Heads;
                let members = self.heads.iter().flat_map(|(pool, class, entries)| {
                    entries.iter().map(|e| (keys::alive(pool, *class), e.member.clone()))
                });
                Next::Read(Read { members: members.collect(), ..Read::default() })
            }
            Stage::Heads => {
                self.heads(&snapshot);
                self.commit()
            }
        }
    }

    fn answered(&mut self, _: Clock, _: Vec<Answer>, _: &mut Cx<'_>) -> Next {
        Next::ok(Response::Ready)
    }

    fn doubtful(&mut self, _: &mut Cx<'_>) -> Next {
        // Nobody waits for it; the next look meets the same facts.
        Next::ok(Response::Ready)
    }
}
