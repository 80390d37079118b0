//! What the replica is told, written to files that `sim replay` feeds to a replica again.
//!
//! The replica's thread only hands copies over; a thread of its own takes the contents out and writes. The files are a
//! ring: each begins with the replica's state, so that each can be replayed alone, and the oldest goes when there are
//! too many. What was handed over is on its way to the file at once, so a killed process leaves all but its last moments.
//!
//! A server does not wait for its recording: what the writer has no time for is left out, and a file begins anew after it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use leasehold_core::recording::Recorder;
use leasehold_core::{Input, Now, Output, Replica};

/// Turns of the replica's loop that may wait to be written.
const WAITING: usize = 1_024;
/// Files that share the limit.
const PARTS: u64 = 8;

/// Where to, and how much.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pub folder: PathBuf,
    /// Bytes of all recordings in the folder.
    pub limit: u64,
}

struct Step {
    /// A file begins with it.
    begin: Option<Box<Begin>>,
    now: Now,
    input: Input,
    outputs: Vec<Output>,
}

struct Begin {
    /// As it was before the step.
    replica: Replica,
    /// The step's.
    number: u64,
    /// What was asked in steps that were left out before it, and how many they were.
    overlooked: Recorder,
    left_out: u64,
}

/// A recording that is being made.
#[derive(Debug)]
pub struct Tape {
    steps: Vec<Step>,
    /// Begun so far, written or left out.
    begun: u64,
    overlooked: Recorder,
    left_out: u64,
    /// The step under way is left out.
    leaving_out: bool,
    to: Option<SyncSender<Vec<Step>>>,
    writer: Option<JoinHandle<()>>,
    told: Arc<Told>,
}

/// What the writer and the replica's thread tell each other.
#[derive(Debug, Default)]
struct Told {
    /// A file is to begin.
    wanted: AtomicBool,
    over: AtomicBool,
    /// Turns that wait to be written.
    waiting: AtomicUsize,
}

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Contents stay out of logs.
        write!(f, "Step({})", self.now)
    }
}

impl Tape {
    /// Makes the first file.
    pub fn start(settings: &Settings) -> io::Result<Tape> {
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("nothing can be recorded in {}: {error}", settings.folder.display()))
        };
        std::fs::create_dir_all(&settings.folder).map_err(named)?;
        let ring = Ring::new(settings).map_err(named)?;
        let (mut tape, from) = Tape::new();
        let (told, folder) = (tape.told.clone(), settings.folder.clone());
        let thread = std::thread::Builder::new().name("leasehold-record".into()).spawn(move || {
            let over = Over(told);
            if let Err(error) = ring.write(&from, &over.0) {
                tracing::error!(%error, folder = %folder.display(), "the recording has ended: it cannot be written");
            }
        })?;
        tape.writer = Some(thread);
        tracing::info!(folder = %settings.folder.display(), "what the replica is told is recorded, without contents");
        Ok(tape)
    }

    fn new() -> (Tape, Receiver<Vec<Step>>) {
        let (to, from) = sync_channel(WAITING);
        let told = Arc::new(Told { wanted: AtomicBool::new(true), ..Told::default() });
        let tape = Tape {
            steps: Vec::new(),
            begun: 0,
            overlooked: Recorder::default(),
            left_out: 0,
            leaving_out: false,
            to: Some(to),
            writer: None,
            told,
        };
        (tape, from)
    }

    /// The replica is about to be told something.
    pub fn begin(&mut self, replica: &Replica, now: Now, input: &Input) {
        if self.told.over.load(Ordering::Relaxed) {
            return;
        }
        let number = self.begun;
        self.begun += 1;
        // After a gap there must be room for more than a moment: a state is dear.
        self.leaving_out = self.left_out > 0 && self.told.waiting.load(Ordering::Relaxed) > WAITING / 2;
        if self.leaving_out {
            return;
        }
        let wanted = self.told.wanted.load(Ordering::Relaxed) && self.told.wanted.swap(false, Ordering::Relaxed);
        let begin = (wanted || self.left_out > 0).then(|| {
            let (overlooked, left_out) = (std::mem::take(&mut self.overlooked), std::mem::take(&mut self.left_out));
            Box::new(Begin { replica: replica.clone(), number, overlooked, left_out })
        });
        self.steps.push(Step { begin, now, input: input.clone(), outputs: Vec::new() });
    }

    /// What came out of it. Without this the step is one in which the replica failed.
    pub fn end(&mut self, outputs: &[Output]) {
        if self.leaving_out {
            self.leave_out(outputs);
        } else if let Some(step) = self.steps.last_mut() {
            step.outputs = outputs.to_vec();
        }
    }

    fn leave_out(&mut self, outputs: &[Output]) {
        self.overlooked.overlook(outputs);
        self.left_out += 1;
    }

    /// Hands over what has come, if there is room for it.
    pub fn flush(&mut self) {
        let Some(to) = self.to.as_ref().filter(|_| !self.steps.is_empty()) else { return };
        self.told.waiting.fetch_add(1, Ordering::Relaxed);
        // A writer that has gone has told why.
        if let Err(TrySendError::Full(steps)) = to.try_send(std::mem::take(&mut self.steps)) {
            self.told.waiting.fetch_sub(1, Ordering::Relaxed);
            for Step { begin, outputs, .. } in steps {
                if let Some(begin) = begin {
                    self.overlooked.learn(begin.overlooked);
                    self.left_out += begin.left_out;
                }
                self.leave_out(&outputs);
            }
        }
    }
}

impl Drop for Tape {
    fn drop(&mut self) {
        self.flush();
        self.to = None;
        // It has nothing to tell that it has not logged.
        let _ = self.writer.take().map(JoinHandle::join);
    }
}

/// Tells when the writer is gone, however that came.
struct Over(Arc<Told>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}

/// The files of this process.
#[derive(Debug)]
struct Ring {
    settings: Settings,
    /// What their names begin with.
    stem: String,
    /// Begun so far.
    begun: u64,
    file: BufWriter<File>,
    path: PathBuf,
    /// Bytes in the present file, and how many are enough.
    written: u64,
    enough: u64,
}

impl Ring {
    fn new(settings: &Settings) -> io::Result<Ring> {
        let ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_millis());
        let stem = format!("leasehold-{ms}-{}", std::process::id());
        let (path, file) = create(settings, &stem, 0)?;
        Ok(Ring { settings: settings.clone(), stem, begun: 0, file, path, written: 0, enough: 0 })
    }

    fn write(mut self, from: &Receiver<Vec<Step>>, told: &Told) -> io::Result<()> {
        let (mut recorder, mut bytes, mut asked) = (Recorder::default(), Vec::new(), false);
        loop {
            let steps = match from.try_recv() {
                Ok(steps) => steps,
                Err(TryRecvError::Empty) => {
                    self.file.flush()?;
                    match from.recv() {
                        Ok(steps) => steps,
                        Err(_) => break,
                    }
                }
                Err(TryRecvError::Disconnected) => break,
            };
            told.waiting.fetch_sub(1, Ordering::Relaxed);
            for Step { begin, now, input, outputs } in steps {
                if let Some(begin) = begin {
                    recorder.learn(begin.overlooked);
                    if begin.left_out > 0 {
                        let (steps, before) = (begin.left_out, begin.number);
                        tracing::warn!(steps, before, "the recording has a gap: it is not written as fast as it comes");
                    }
                    if !self.turn(&Recorder::begin(env!("CARGO_PKG_VERSION"), begin.number, &begin.replica))? {
                        return self.file.flush();
                    }
                    asked = false;
                }
                bytes.clear();
                recorder.step(now, input, outputs, &mut bytes);
                self.add(&bytes)?;
                if !asked && self.written >= self.enough {
                    asked = true;
                    told.wanted.store(true, Ordering::Relaxed);
                }
            }
        }
        self.file.flush()?;
        if self.begun == 0 {
            // Nothing was ever told: the server did not start.
            std::fs::remove_file(&self.path)?;
        }
        Ok(())
    }

    fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    /// Begins the next file; whether there is room for it.
    fn turn(&mut self, begin: &[u8]) -> io::Result<bool> {
        let (limit, state) = (self.settings.limit, begin.len() as u64);
        // With a large state a file has at least as much of steps.
        let part = (limit / PARTS).max(2 * state);
        if part > limit / 2 {
            tracing::warn!(state, limit, "the recording has ended: its limit is below four times the replica's state");
            return Ok(false);
        }
        if self.begun > 0 {
            self.file.flush()?;
            (self.path, self.file) = create(&self.settings, &self.stem, self.begun)?;
        }
        self.begun += 1;
        (self.written, self.enough) = (0, part);
        self.make_room(part)?;
        self.add(begin)?;
        self.file.flush()?;
        Ok(true)
    }

    /// Removes the oldest recordings until so many bytes more are within the limit: of whichever process, but not
    /// the one that a process is writing.
    fn make_room(&self, bytes: u64) -> io::Result<()> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.settings.folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let ours = name.to_str().is_some_and(|n| n.starts_with("leasehold-") && n.ends_with(".record"));
            // One that has just vanished has made room.
            if let (true, Ok(about)) = (ours && entry.path() != self.path, entry.metadata()) {
                files.push((about.modified()?, entry.path(), about.len()));
            }
        }
        files.sort();
        let mut all: u64 = files.iter().map(|(_, _, len)| len).sum();
        for (_, path, len) in files {
            if all + bytes <= self.settings.limit {
                break;
            }
            let removed = match File::open(&path).map(|file| file.try_lock()) {
                Ok(Err(TryLockError::WouldBlock)) => continue,
                _ => std::fs::remove_file(&path),
            };
            match removed {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(%error, path = %path.display(), "an old recording cannot be removed");
                }
                _ => all -= len,
            }
        }
        Ok(())
    }
}

/// A file that only its owner can read, locked for as long as it is written.
fn create(settings: &Settings, stem: &str, number: u64) -> io::Result<(PathBuf, BufWriter<File>)> {
    let path = settings.folder.join(format!("{stem}.{number:06}.record"));
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
    // On a file system without locks it may be removed by another process.
    let _ = file.try_lock();
    Ok((path, BufWriter::with_capacity(1 << 20, file)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_core::recording::Player;
    use leasehold_core::request::{Request, RequestId};
    use leasehold_core::store::Store as _;
    use leasehold_core::store::model::Model;
    use leasehold_core::{Config, StoreAnswer, StoreOp};

    /// A replica on the model store, recorded.
    struct Server {
        replica: Replica,
        store: Model,
        tape: Tape,
        now: Now,
        inputs: Vec<Input>,
    }

    impl Server {
        fn turn(&mut self, input: Input) {
            self.now += 1;
            self.inputs.push(input);
            while let Some(input) = self.inputs.pop() {
                let mut out = Vec::new();
                self.tape.begin(&self.replica, self.now, &input);
                self.replica.step(self.now, input, &mut out);
                self.tape.end(&out);
                for output in out {
                    let Output::Store { id, op } = output else { continue };
                    let reply = match op {
                        StoreOp::Read(read) => self.store.read(&read).map(StoreAnswer::Read),
                        StoreOp::Commit(commit) => self.store.commit(&commit).map(StoreAnswer::Commit),
                    };
                    self.inputs.push(Input::StoreReply { id, reply });
                }
            }
            self.tape.flush();
        }
    }

    /// Nobody writes for a while: the server goes on, and what was recorded before and after is replayed.
    #[test]
    fn a_slow_writer_leaves_a_gap_and_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let settings = Settings { folder: folder.path().into(), limit: 1 << 20 };
        let (tape, from) = Tape::new();
        let (replica, store) = (Replica::new(Config::default(), [7; 32]), Model::new(1_700_000_000_000_000));
        let mut server = Server { replica, store, tape, now: 0, inputs: Vec::new() };
        server.turn(Input::Timer);
        let told = server.tape.told.clone();
        let ask = |server: &mut Server, n: u64| {
            let queue = format!("q{}", n % 7);
            let request = Request::SetQueue { tenant: "t".into(), queue, lease_ms: Some(1_000 + n) };
            server.turn(Input::Request { id: RequestId(n), request });
        };
        let turns = WAITING as u64 * 2;
        (0..turns).for_each(|n| ask(&mut server, n));
        assert!(server.tape.left_out > 0);
        // The writer comes to life.
        let ring = Ring::new(&settings).unwrap();
        let thread = std::thread::spawn(move || ring.write(&from, &told).unwrap());
        while server.tape.told.waiting.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        (turns..turns + 100).for_each(|n| ask(&mut server, n));
        let steps = server.tape.begun;
        drop(server);
        thread.join().unwrap();

        let mut files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()).collect();
        files.sort();
        let mut ranges = Vec::new();
        for file in files {
            let bytes = std::fs::read(file).unwrap();
            let player = Player::new(&bytes).unwrap();
            let (first, mut end) = (player.header.first, player.header.first);
            for played in player {
                assert_eq!(played.same, Ok(()), "{}", played.number);
                end = played.number + 1;
            }
            ranges.push((first, end));
        }
        let gaps = ranges.windows(2).filter(|two| two[0].1 < two[1].0).count();
        assert_eq!((gaps, ranges[0].0, ranges.last().unwrap().1), (1, 0, steps), "{ranges:?}");
    }
}
