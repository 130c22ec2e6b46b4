//! Blocks over another fabric: a transfer engine moves them, beside a link that carries the rest.
//!
//! Frames go over the inner link as they are. Of a block's bytes, the sender copies a slot's worth
//! into registered memory and says where they are; the receiver has its engine read them, and says
//! so, and the slot is used again. So the peers have proven themselves to each other before a byte of a
//! block is offered, and each engine writes to memory of its own process only. A sum comes with each
//! slot: a slot of a link that ended may hold another block by the time it is read. Records on the
//! inner link:
//!
//! ```text
//! INLINE  len     bytes       as they were written
//! SESSION len     name        of the sender's engine; before the first PLACED
//! PLACED  len     address sum these bytes come next; read them there
//! TAKEN   0                   the oldest placed bytes were read
//! ```

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::link::{Accepting, Cutter, Link, Transport, read_exact, write_all};
use super::settings::PeerSettings;
use super::staging::{Buffer, Engine, SLOT, Staging};
use super::tcp::Tcp;
use crate::block;
use crate::error::{Error, Result};

const INLINE: u8 = 1;
const SESSION: u8 = 2;
const PLACED: u8 = 3;
const TAKEN: u8 = 4;

/// Slots that one link may have on their way.
const SLOTS: usize = 4;
/// Longest name of an engine.
const SESSION_MAX: usize = 256;
/// Most that may arrive unasked while a sender waits for a slot: a few requests.
const AHEAD_MAX: usize = 64 << 10;
/// Until it is set; see [`Link::set_patience`].
const PATIENCE: Duration = Duration::from_secs(3);

/// See the module.
pub struct Fabric {
    inner: Tcp,
    staging: Arc<Staging>,
}

impl Fabric {
    /// Frames over TCP as `settings` say, blocks over `engine`.
    pub fn new(settings: &PeerSettings, engine: Box<dyn Engine>) -> Result<Self> {
        if settings.tls.is_some() {
            let why = "does not cover what a transfer engine moves; use store.peer.token_file";
            return Err(Error::config("store.peer.tls", why));
        }
        Ok(Self { inner: Tcp::new(settings)?, staging: Staging::new(engine) })
    }
}

impl Transport for Fabric {
    fn connect(&self, address: &str, deadline: Instant) -> Result<Box<dyn Link>> {
        let inner = self.inner.connect(address, deadline)?;
        Ok(Box::new(FabricLink::new(inner, Arc::clone(&self.staging))))
    }

    fn listen(&self) -> Result<Option<Box<dyn Accepting>>> {
        let Some(inner) = self.inner.listen()? else { return Ok(None) };
        Ok(Some(Box::new(Listening { inner, staging: Arc::clone(&self.staging) })))
    }
}

struct Listening {
    inner: Box<dyn Accepting>,
    staging: Arc<Staging>,
}

impl Accepting for Listening {
    fn accept(&self) -> Result<Box<dyn Link>> {
        Ok(Box::new(FabricLink::new(self.inner.accept()?, Arc::clone(&self.staging))))
    }

    fn address(&self) -> String {
        self.inner.address()
    }

    fn cutter(&self) -> io::Result<Cutter> {
        self.inner.cutter()
    }
}

/// What `read` hands out before it looks at the next record.
enum Incoming {
    Nothing,
    Inline { left: usize },
    Placed { at: usize, end: usize },
}

struct FabricLink {
    inner: Box<dyn Link>,
    staging: Arc<Staging>,
    patience: Duration,
    incoming: Incoming,
    /// Inline bytes that came while a slot was waited for.
    ahead: VecDeque<u8>,
    /// The peer's engine, once it has said so.
    session: Option<String>,
    /// Where placed bytes are read to.
    landing: Option<Buffer>,
    slots: Vec<Buffer>,
    /// Slots whose bytes the peer has not taken, from `next_slot - placed` on.
    placed: usize,
    next_slot: usize,
}

impl FabricLink {
    fn new(inner: Box<dyn Link>, staging: Arc<Staging>) -> Self {
        Self {
            inner,
            staging,
            patience: PATIENCE,
            incoming: Incoming::Nothing,
            ahead: VecDeque::new(),
            session: None,
            landing: None,
            slots: Vec::new(),
            placed: 0,
            next_slot: 0,
        }
    }

    fn record(&mut self, kind: u8, len: usize, parts: &[IoSlice<'_>]) -> io::Result<()> {
        let head = record_head(kind, len);
        let mut all: Vec<_> =
            std::iter::once(IoSlice::new(&head)).chain(parts.iter().copied()).collect();
        write_all(&mut *self.inner, &mut all)
    }

    /// Take the next record in; false at the end of the stream.
    fn receive(&mut self) -> io::Result<bool> {
        let mut head = [0; HEAD];
        match self.inner.read(&mut head)? {
            0 => return Ok(false),
            read => read_exact(&mut *self.inner, &mut head[read..])?,
        }
        let [kind, len @ ..] = head;
        let len = u32::from_le_bytes(len) as usize;
        match kind {
            INLINE => self.incoming = Incoming::Inline { left: len },
            SESSION if len <= SESSION_MAX => {
                let mut name = vec![0; len];
                read_exact(&mut *self.inner, &mut name)?;
                let name = String::from_utf8(name);
                self.session = Some(name.map_err(|_| invalid("the name of an engine"))?);
            }
            PLACED if len <= SLOT => {
                let (mut address, mut sum) = ([0; 8], [0; 4]);
                read_exact(&mut *self.inner, &mut address)?;
                read_exact(&mut *self.inner, &mut sum)?;
                self.pull(u64::from_le_bytes(address), len, u32::from_le_bytes(sum))?;
            }
            TAKEN if self.placed > 0 => self.placed -= 1,
            _ => return Err(invalid("a record; does the peer use a transfer engine too?")),
        }
        Ok(true)
    }

    fn pull(&mut self, source: u64, len: usize, sum: u32) -> io::Result<()> {
        let session = self.session.as_deref().ok_or_else(|| invalid("bytes of no engine"))?;
        let landing = match &mut self.landing {
            Some(landing) => landing,
            none => none.insert(self.staging.take()?),
        };
        landing.pull(session, source, len, self.patience)?;
        if block::sum(&landing.bytes()[..len]) != sum {
            return Err(invalid("a slot that holds something else by now"));
        }
        self.incoming = Incoming::Placed { at: 0, end: len };
        self.record(TAKEN, 0, &[])
    }

    /// A slot that the peer does not read: copy into it and place it.
    fn place(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.slots.is_empty() {
            let name = self.staging.engine.session().to_owned();
            self.record(SESSION, name.len(), &[IoSlice::new(name.as_bytes())])?;
        }
        while self.placed == SLOTS {
            self.wait_for_taken()?;
        }
        if self.slots.len() < SLOTS {
            self.slots.push(self.staging.take()?);
        }
        let slot = self.next_slot % self.slots.len();
        let len = bytes.len().min(SLOT);
        self.slots[slot].bytes()[..len].copy_from_slice(&bytes[..len]);
        let address = (self.slots[slot].address() as u64).to_le_bytes();
        let sum = block::sum(&bytes[..len]).to_le_bytes();
        self.record(PLACED, len, &[IoSlice::new(&address), IoSlice::new(&sum)])?;
        (self.placed, self.next_slot) = (self.placed + 1, slot + 1);
        Ok(len)
    }

    fn wait_for_taken(&mut self) -> io::Result<()> {
        if let Incoming::Inline { left } = self.incoming {
            if self.ahead.len() + left > AHEAD_MAX {
                return Err(invalid("more than a sender can keep"));
            }
            let mut bytes = vec![0; left];
            read_exact(&mut *self.inner, &mut bytes)?;
            self.ahead.extend(bytes);
            self.incoming = Incoming::Nothing;
        }
        if self.receive()? { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

impl Link for FabricLink {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if !self.ahead.is_empty() {
            return io::Read::read(&mut self.ahead, into);
        }
        loop {
            match &mut self.incoming {
                Incoming::Inline { left } if *left > 0 => {
                    let len = into.len().min(*left);
                    let read = self.inner.read(&mut into[..len])?;
                    *left -= read;
                    return Ok(read);
                }
                Incoming::Placed { at, end } if *at < *end => {
                    let len = into.len().min(*end - *at);
                    let landed = self.landing.as_mut().map(Buffer::bytes).unwrap_or_default();
                    into[..len].copy_from_slice(&landed[*at..*at + len]);
                    *at += len;
                    return Ok(len);
                }
                _ => {}
            }
            if !self.receive()? {
                return Ok(0);
            }
        }
    }

    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let len = parts.iter().map(|part| part.len()).sum();
        self.record(INLINE, len, parts)?;
        Ok(len)
    }

    fn write_block(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.place(bytes)
    }

    fn set_patience(&mut self, read: Duration, write: Duration) -> io::Result<()> {
        self.patience = write;
        self.inner.set_patience(read, write)
    }

    fn cutter(&self) -> io::Result<Cutter> {
        self.inner.cutter()
    }
}

const HEAD: usize = 5;

fn record_head(kind: u8, len: usize) -> [u8; HEAD] {
    let [a, b, c, d] = (len as u32).to_le_bytes();
    [kind, a, b, c, d]
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not understood: {what}"))
}
