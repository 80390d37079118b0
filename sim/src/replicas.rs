//! Replicas on their hosts: a clock of their own, crashes between any two outputs, pauses.

use std::collections::BTreeSet;

use leasehold_core::{Input, Output, Outputs, Replica};

use crate::calls::{CallId, Fate, Heard};
use crate::choices::{Choices as _, Topic};
use crate::oracle::Promise;
use crate::setup::{MILLI, SECOND};
use crate::strikes::Kind;
use crate::tables::Blow;
use crate::tape::Tape;
use crate::world::{Event, Micros, World};

/// A machine on which one replica after the other lives.
#[derive(Clone, Debug, Default)]
pub struct Host {
    pub replica: Option<Replica>,
    /// Counts its starts; what was meant for an earlier life is dropped.
    pub epoch: u32,
    pub started: Micros,
    /// Parts per million by which its clock runs fast (or slow).
    pub drift_ppm: i64,
    /// Microseconds by which its clock was stepped forward.
    pub stepped: u64,
    pub paused: bool,
    /// What came while it was paused.
    pub backlog: Vec<Input>,
    /// The timer that is set, and the number by which its event knows that it still is.
    pub timer: Option<u64>,
    pub timer_set: u32,
    /// Inputs that the present life has taken.
    pub inputs: u64,
    /// Calls in work.
    pub open: BTreeSet<CallId>,
    /// Good answers from the store in this life.
    pub answers: u64,
    /// A drained process is stopped then, and started again after `stop_rest`.
    pub stop_at: Option<Micros>,
    pub stop_rest: Micros,
    /// Its recording, if one is made.
    pub tape: Option<Box<Tape>>,
    /// Since when it was neither paused nor had its clock stepped.
    pub undisturbed_since: Micros,
}

impl Host {
    /// Its monotonic clock, microseconds since its start.
    fn elapsed_us(&self, now: Micros) -> u64 {
        let real = now.saturating_sub(self.started);
        let drift = (real as i128 * i128::from(self.drift_ppm) / 1_000_000) as i64;
        real.saturating_add_signed(drift) + self.stepped
    }

    pub fn elapsed_ms(&self, now: Micros) -> u64 {
        self.elapsed_us(now) / MILLI
    }

    /// When its clock will show that, by the world's time.
    fn when(&self, ms: u64, now: Micros) -> Micros {
        let ahead = (ms * MILLI).saturating_sub(self.elapsed_us(now));
        let rate = 1_000_000i128 + i128::from(self.drift_ppm);
        // Rounded up, and one more: never before the clock shows it.
        now + (ahead as i128 * 1_000_000 / rate) as u64 + 1
    }
}

impl World {
    /// Starts a replica, empty, with a seed of its own.
    pub fn boot(&mut self, r: usize, epoch: u32) {
        if self.hosts[r].epoch != epoch || self.hosts[r].replica.is_some() {
            return;
        }
        let seed = self.choices.seed32(Topic::ReplicaSeed.of(r));
        let drift = self.setup.drift_ppm;
        let drift_ppm = self.choices.draw(Topic::Skew.of(r), 2 * drift + 1) as i64;
        let host = &mut self.hosts[r];
        *host = Host {
            replica: Some(Replica::new(self.setup.config.clone(), seed)),
            epoch,
            started: self.now,
            drift_ppm: if drift_ppm > drift as i64 { drift as i64 - drift_ppm } else { drift_ppm },
            undisturbed_since: self.now,
            stepped: self.setup.clocks_from_us * (r as u64 + 1),
            tape: self.taping.map(|every| Box::new(Tape::new(r, epoch, every))),
            ..Host::default()
        };
        self.digest.add(&("boot", r, epoch));
        self.input(r, epoch, Input::Timer);
    }

    pub fn timer_is_set(&self, replica: u8, epoch: u32, set: u32) -> bool {
        let host = &self.hosts[usize::from(replica)];
        host.epoch == epoch && host.timer_set == set && host.timer.is_some()
    }

    /// Hands an input to a replica, if that life of it is still on.
    pub fn input(&mut self, r: usize, epoch: u32, input: Input) {
        let host = &mut self.hosts[r];
        if host.epoch != epoch || host.replica.is_none() {
            return;
        }
        if !host.paused && self.struck(Kind::Pause) {
            self.pause(r, 20 * SECOND);
        }
        let host = &mut self.hosts[r];
        if host.paused {
            host.backlog.push(input);
            return;
        }
        if matches!(input, Input::Timer) {
            host.timer = None;
        }
        if let Input::StoreReply { reply: Ok(_), .. } = &input {
            host.answers += 1;
        }
        host.inputs += 1;
        let now = host.elapsed_ms(self.now);
        let Some(replica) = &mut host.replica else { return };
        let mut out = Outputs::new();
        self.digest.num(r as u64);
        self.digest.num(now);
        let taped = host.tape.as_mut().map(|tape| {
            tape.begin(replica);
            input.clone()
        });
        replica.step(now, input, &mut out);
        if let (Some(tape), Some(input)) = (&mut host.tape, taped) {
            tape.step(now, input, &out);
        }
        self.counts.steps += 1;
        self.perform(r, epoch, out);
    }

    /// Does what a step asked for, in an order that means nothing, unless the replica dies half-way.
    fn perform(&mut self, r: usize, epoch: u32, mut out: Outputs) {
        if out.len() > 1 {
            for i in (1..out.len()).rev() {
                let j = i - self.choices.draw(Topic::Shuffle.of(r), i as u64 + 1) as usize;
                out.swap(i, j);
            }
        }
        let weight = u64::from(self.setup.faults.crash_step);
        let dies = self.phase == Phase::Chaos && self.choices.chance_in(Topic::CrashStep.of(r), weight, 10_000);
        if dies {
            let keep = self.choices.draw(Topic::CrashStep.of(r), out.len() as u64 + 1) as usize;
            out.truncate(keep);
        }
        for output in out {
            if self.struck(Kind::Crash) {
                return self.crash(r, Some(SECOND));
            }
            match output {
                Output::Store { id, op } => {
                    self.digest.add(&op);
                    self.to_store(r, epoch, id, op);
                }
                Output::Reply { id, outcome } => self.replied(r, id.0 as CallId, outcome),
                Output::Mark(mark) => {
                    self.say_mark(r, mark);
                    *self.marks.entry(mark).or_default() += 1;
                }
            }
        }
        if dies {
            self.count_fault("crash_step");
            let rest = self.choices.between(Topic::CrashStep.of(r), 1, 8 * SECOND);
            self.say_fault(&format!("r{r} dies between two outputs of a step, for {} ms", rest / MILLI));
            self.crash(r, Some(rest));
            return;
        }
        self.set_timer(r);
    }

    /// Asks for the timer that the replica wants next.
    pub fn set_timer(&mut self, r: usize) {
        let host = &mut self.hosts[r];
        let wanted = host.replica.as_ref().and_then(Replica::next_timer);
        if wanted == host.timer {
            return;
        }
        host.timer = wanted;
        host.timer_set += 1;
        let (epoch, set) = (host.epoch, host.timer_set);
        if let Some(ms) = wanted {
            let after = host.when(ms, self.now) - self.now;
            self.schedule(after, Event::Timer { replica: r as u8, epoch, set });
        }
    }

    /// The process is gone with everything in its memory; what it sent is still under way. With a
    /// rest, a new one starts after it.
    pub fn crash(&mut self, r: usize, rest: Option<Micros>) {
        if self.hosts[r].replica.is_none() {
            return;
        }
        self.counts.crashes += 1;
        self.blow_all(Blow::Crash, Some(r));
        let host = &mut self.hosts[r];
        self.tapes.extend(host.tape.take().map(|tape| *tape));
        host.replica = None;
        host.epoch += 1;
        host.paused = false;
        host.backlog.clear();
        host.timer = None;
        let epoch = host.epoch;
        let open = std::mem::take(&mut host.open);
        for call in open {
            self.outcome_never_known(call);
            if self.choices.draw(Topic::CallLink.of(r), 4) < 3 {
                let after = self.choices.between(Topic::Latency.of(r), 200, 5_000);
                self.schedule(after, Event::Answer { call, heard: Box::new(Heard::Nothing) });
            }
        }
        if let Some(rest) = rest {
            self.schedule(rest, Event::Boot { replica: r as u8, epoch });
        }
    }

    /// Nobody will ever tell how the call ended.
    pub fn outcome_never_known(&mut self, call: CallId) {
        if let Some(call) = self.ledger.get_mut(call) {
            for item in &mut call.items {
                if item.fate == Fate::Open {
                    item.fate = Fate::Unknown;
                }
            }
        }
    }

    pub fn pause(&mut self, r: usize, length: Micros) {
        let host = &mut self.hosts[r];
        if host.replica.is_none() || host.paused {
            return;
        }
        host.paused = true;
        self.blow_all(Blow::Pause, Some(r));
        let host = &mut self.hosts[r];
        let epoch = host.epoch;
        self.schedule(length, Event::Resume { replica: r as u8, epoch });
    }

    pub fn resume(&mut self, r: usize, epoch: u32) {
        let host = &mut self.hosts[r];
        if host.epoch != epoch || !host.paused {
            return;
        }
        host.paused = false;
        host.undisturbed_since = self.now;
        // Its timer went off while it was away, if it was due.
        let backlog = std::mem::take(&mut host.backlog);
        for input in backlog {
            self.input(r, epoch, input);
        }
        self.set_timer(r);
    }

    /// A replica's own clock steps forward; it is monotonic, so never back.
    pub fn step_clock(&mut self, r: usize, by: Micros) {
        self.blow_all(Blow::ReplicaClock, Some(r));
        let host = &mut self.hosts[r];
        host.stepped += by;
        host.undisturbed_since = self.now;
        // The set timer is nearer now.
        host.timer = None;
        if host.replica.is_some() && !host.paused {
            self.set_timer(r);
        }
    }

    /// A replica answered a request.
    fn replied(&mut self, r: usize, call: CallId, outcome: leasehold_core::Outcome) {
        self.digest.num(u64::from(call));
        self.digest.add(&outcome);
        self.say_reply(r, call, &outcome);
        self.judge_declared(r, call, &outcome);
        let known = self.hosts[r].open.remove(&call);
        let hung_up = self.ledger.get(call).is_some_and(|c| c.hung_up);
        if !known {
            if !hung_up {
                let what = format!("replica {r} answered call {call}, which it did not have: {outcome:?}");
                self.violate(Promise::HonestReplies, what);
            }
            return;
        }
        self.store.tick(self.now);
        let answers = self.hosts[r].answers;
        let other = self.corrupt_reply(call, &outcome);
        let told = other.as_ref().unwrap_or(&outcome);
        let checked = self.oracle.reply(&self.store.model, &mut self.ledger, call, told, answers, self.now);
        self.hold(checked);
        if let Some(call) = self.ledger.get_mut(call) {
            call.replied = true;
        }
        self.send_answer(r, call, outcome);
    }
}

use crate::world::Phase;
