package mqtt

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

const (
	readBuffer  = 64 << 10
	writeChunk  = 16 << 10  // one write(2), one TLS record
	writeBuffer = 256 << 10 // Publish waits while more than this is not written yet
	spareBuffer = 1 << 20   // a buffer that one huge message has grown beyond this is not kept
	slowestLink = 16 << 10  // bytes per second that a ping grants a link for what is in flight before it
)

// conn is the connection that paho reads and writes. It buffers reads and joins writes, since paho does three reads and a
// write per packet, and it owns what paho gets wrong about time:
//
//   - Write never blocks, so no goroutine of paho ever waits for the network: admit holds the publisher back instead, and
//     the flusher notices the stall. (In paho a blocked write blocks the ping that should notice it.)
//   - Pings are sent and judged here. paho waits a fixed time for the answer; behind a full window on a slow link, or
//     while the consumer does not take messages, that kills a healthy connection.
//
// The first reason for the end wins, and failed is told it, before any token of paho fails.
type conn struct {
	*link
	o      Options
	failed func(error)
	in     *bufio.Reader
	done   chan struct{}  // closed at the end
	tasks  sync.WaitGroup // flusher, pinger

	mu     sync.Mutex
	work   *sync.Cond // the flusher waits for something to write
	room   *sync.Cond // admit waits for the flusher
	buf    []byte     // not yet handed to the flusher
	spare  []byte
	queued int  // not yet written, in buf or in the flusher's hands
	handed int  // messages that admit let pass and paho has not written yet
	drain  bool // close after the last byte
	err    error
	sent   time.Time // when paho or the pinger last wrote
	moved  time.Time // when the flusher last wrote
	flight flight

	began    time.Time
	received atomic.Int64 // when the network was last read, in nanoseconds since began
	reading  atomic.Int64 // since when paho waits for the network, likewise; 0: it is busy with what it has
	connack  atomic.Int32 // return code + 1 of the CONNACK
	frames   frames       // used by the reader only
}

func newConn(l *link, o Options, failed func(error)) *conn {
	c := &conn{link: l, o: o, failed: failed, done: make(chan struct{})}
	c.work, c.room = sync.NewCond(&c.mu), sync.NewCond(&c.mu)
	c.in = bufio.NewReaderSize(source{c}, readBuffer)
	c.began = time.Now()
	c.sent, c.moved = c.began, c.began
	c.tasks.Add(1)
	go c.flush()
	return c
}

// Read serves paho's reader from the buffer.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.in.Read(p)
	if err != nil {
		err = c.end(classify("read", err), true)
	}
	return n, err
}

// source is the network below the read buffer.
type source struct{ c *conn }

func (s source) Read(p []byte) (int, error) {
	s.c.reading.Store(int64(time.Since(s.c.began)))
	n, err := s.c.link.Read(p)
	s.c.reading.Store(0)
	if n > 0 {
		s.c.received.Store(int64(time.Since(s.c.began)))
		pubacks := s.c.frames.scan(p[:n], &s.c.connack)
		s.c.mu.Lock()
		s.c.flight.acked(pubacks)
		s.c.mu.Unlock()
	}
	return n, err
}

// Write takes one packet. It fails only on a connection that has ended.
func (c *conn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, c.err
	}
	if c.drain {
		return len(p), nil // nothing follows a DISCONNECT
	}
	start := len(c.buf)
	c.buf = append(c.buf, p...)
	switch p[0] >> 4 {
	case packetConnect:
		setKeepAlive(c.buf[start:], c.o.KeepAlive)
	case packetPublish:
		c.flight.sent(len(p))
		c.handed--
		c.room.Broadcast()
	}
	c.queued += len(p)
	c.sent = time.Now()
	if start == 0 {
		c.work.Signal()
	}
	return len(p), nil
}

// admit waits until the link has room for another message, or has ended.
func (c *conn) admit() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.queued > writeBuffer && c.err == nil && !c.drain {
		c.room.Wait()
	}
	if c.drain && c.err == nil {
		return ErrClosed
	}
	c.handed++
	return c.err
}

// withdraw takes an admission back, of a message that paho did not take.
func (c *conn) withdraw() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.handed--
	c.room.Broadcast()
}

func (c *conn) flush() {
	defer c.tasks.Done()
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		for len(c.buf) == 0 && c.err == nil && !c.drain {
			c.work.Wait()
		}
		if c.err != nil {
			return
		}
		if len(c.buf) == 0 { // drained
			c.mu.Unlock()
			c.finish() // the peer closes now, and paho's reader sees it; shutdown bounds the wait
			c.mu.Lock()
			return
		}
		b := c.buf
		c.buf = c.spare[:0]
		for rest := b; len(rest) > 0; {
			n := min(len(rest), writeChunk)
			c.mu.Unlock()
			_, err := c.link.Write(rest[:n])
			if err != nil {
				err = c.end(classify("write", err), true)
			}
			c.mu.Lock()
			if err != nil {
				return
			}
			rest = rest[n:]
			c.queued -= n
			c.moved = time.Now()
			if c.queued <= writeBuffer {
				c.room.Broadcast()
			}
		}
		if c.spare = b; cap(b) > spareBuffer {
			c.spare = nil
		}
	}
}

// keepAlive sends pings and ends a connection on which nothing moves. It returns at the end of the connection.
func (c *conn) keepAlive() {
	defer c.tasks.Done()
	tick := time.NewTicker(max(min(c.o.KeepAlive, c.o.PingTimeout)/4, time.Millisecond))
	defer tick.Stop()
	var asked, confirmed time.Time // when a ping went out that nothing has answered; when TCP last confirmed bytes
	queue := -1
	for {
		select {
		case <-c.done:
			return
		case <-tick.C:
		}
		now, received := time.Now(), c.began.Add(time.Duration(c.received.Load()))
		if received.After(asked) {
			asked = time.Time{} // whatever came, the broker lives
		}
		c.mu.Lock()
		sent, moved, queued, inFlight := c.sent, c.moved, c.queued, c.flight.bytes
		c.mu.Unlock()
		q := sendQueue(c.tcp.TCPConn)
		if q >= 0 && q < queue {
			confirmed = now
		}
		queue = q
		// While paho does not read, the consumer is slow: the answer may lie unread, and the broker still wants pings.
		reading := c.reading.Load()
		if idle := now.Sub(sent) >= c.o.KeepAlive; idle && reading == 0 || asked.IsZero() && (idle || now.Sub(received) >= c.o.KeepAlive) {
			if asked.IsZero() {
				asked = now
			}
			if _, err := c.Write([]byte{packetPingreq << 4, 0}); err != nil {
				return
			}
			continue
		}
		if asked.IsZero() || reading == 0 || queued > 0 {
			continue // nothing to judge, or the flusher's to judge
		}
		quiet := now.Sub(latest(asked, moved, confirmed, c.began.Add(time.Duration(reading))))
		if limit := c.o.PingTimeout + time.Duration(inFlight)*time.Second/slowestLink; quiet >= limit {
			c.end(fmt.Errorf("%w: no answer to a ping for %s", ErrTimeout, limit), true)
			return
		}
	}
}

func latest(first time.Time, more ...time.Time) time.Time {
	for _, t := range more {
		if t.After(first) {
			first = t
		}
	}
	return first
}

// startKeepAlive is called once, after the CONNACK.
func (c *conn) startKeepAlive() {
	c.tasks.Add(1)
	go c.keepAlive()
}

// shutdown sends a DISCONNECT after all that was written, says that nothing follows, and lets the broker hang up. (To
// close first would reset the connection when something unread has come, and the broker would lose the last packets.)
// ctx bounds it.
func (c *conn) shutdown(ctx context.Context) {
	defer context.AfterFunc(ctx, func() { c.end(ErrClosed, false) })()
	c.mu.Lock()
	for c.handed > 0 && c.err == nil {
		c.room.Wait()
	}
	if c.err == nil {
		c.buf = append(c.buf, packetDisconnect<<4, 0)
		c.queued += 2
		c.drain = true
	}
	c.work.Signal()
	c.room.Broadcast()
	c.mu.Unlock()
	<-c.done
	c.tasks.Wait()
}

// abort cuts without sending what is still queued, in the kernel neither.
func (c *conn) abort() {
	_ = c.tcp.SetLinger(0)
	c.end(ErrClosed, false)
	c.tasks.Wait()
}

// Close is for paho, which calls it when it gives the connection up; its reason comes to session.
func (c *conn) Close() error {
	c.end(ErrClosed, false)
	return nil
}

func (c *conn) SetWriteDeadline(time.Time) error { return nil }

// end ends the connection once, for the first reason given, which it returns. The socket is closed after the reason is
// set, so that paho's reader wakes up to the reason and not to the text of a closed socket.
func (c *conn) end(reason error, report bool) error {
	c.mu.Lock()
	first := c.err == nil
	if first {
		c.err = reason
		close(c.done)
	}
	reason = c.err
	c.work.Broadcast()
	c.room.Broadcast()
	c.mu.Unlock()
	if first {
		_ = c.tcp.Close()
		if report {
			c.failed(reason)
		}
	}
	return reason
}

const (
	packetConnect    = 1
	packetConnack    = 2
	packetPublish    = 3
	packetPuback     = 4
	packetPingreq    = 12
	packetDisconnect = 14
)

// setKeepAlive writes the interval into a CONNECT. paho is told none, which keeps it from sending pings of its own.
func setKeepAlive(connect []byte, interval time.Duration) {
	_, n := binary.Uvarint(connect[1:]) // the same encoding
	at := 1 + n
	at += 2 + int(binary.BigEndian.Uint16(connect[at:])) + 2 // protocol name, level, flags
	binary.BigEndian.PutUint16(connect[at:], uint16(min((interval+time.Second-1)/time.Second, 65535)))
}

// frames walks through a stream of packets.
type frames struct {
	kind   byte // of the current packet; 0: at the boundary
	shift  uint // 0 … 28 within the length, then bodyState
	length int
	at     int
}

const bodyState = 99

// scan counts the PUBACKs that end in p, and keeps the code of a CONNACK.
func (f *frames) scan(p []byte, connack *atomic.Int32) (pubacks int) {
	for len(p) > 0 {
		switch {
		case f.kind == 0:
			*f = frames{kind: max(p[0]>>4, 1)}
			p = p[1:]
			continue
		case f.shift != bodyState:
			f.length |= int(p[0]&0x7f) << f.shift
			if f.shift += 7; p[0]&0x80 == 0 || f.shift > 21 {
				f.shift = bodyState
			}
			p = p[1:]
		default:
			n := min(len(p), f.length-f.at)
			if f.kind == packetConnack && f.at <= 1 && f.at+n > 1 {
				connack.Store(int32(p[1-f.at]) + 1)
			}
			f.at += n
			p = p[n:]
		}
		if f.shift == bodyState && f.at == f.length {
			if f.kind == packetPuback {
				pubacks++
			}
			f.kind = 0
		}
	}
	return pubacks
}

// flight adds up the bytes of the PUBLISH packets that wait for a PUBACK. Brokers answer in order;
// one that does not spoils only the time that a ping is given.
type flight struct {
	sizes []int
	bytes int
}

func (f *flight) sent(n int) {
	f.sizes = append(f.sizes, n)
	f.bytes += n
}

func (f *flight) acked(n int) {
	for _, size := range f.sizes[:min(n, len(f.sizes))] {
		f.bytes -= size
	}
	f.sizes = f.sizes[min(n, len(f.sizes)):]
}
