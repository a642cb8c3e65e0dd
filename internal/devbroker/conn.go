package devbroker

import (
	"net"
	"sync"
	"time"
)

const (
	writeLimit = 30 * time.Second // a client that takes nothing for so long is cut
	closeLimit = time.Second      // for what is still to be written when mochi closes a connection
	writeChunk = 64 << 10
	maxQueue   = 256 << 20 // bytes; more wait in mochi, and with them whoever publishes to this client
)

// conn is one client's connection. Its Write does not wait for the network: mochi holds a lock while it writes, which
// everybody who publishes to this client needs as well, so that one slow reader would stop all publishers.
type conn struct {
	net.Conn
	flushed chan struct{} // closed when nothing will be written any more
	ended   chan struct{} // closed when mochi is done with the connection

	mu      sync.Mutex
	change  *sync.Cond
	queue   []byte
	closing bool        // close when the queue is empty
	late    *time.Timer // or when this has run out
	err     error

	// What the hooks keep for it, on its own goroutine only.
	held      func() // unlocks what they have locked
	subscribe uint16 // packet id of the SUBSCRIBE in hand
}

func newConn(c net.Conn) *conn {
	n := &conn{Conn: c, flushed: make(chan struct{}), ended: make(chan struct{})}
	n.change = sync.NewCond(&n.mu)
	return n
}

func (c *conn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.queue) > maxQueue && c.err == nil && !c.closing {
		c.change.Wait()
	}
	switch {
	case c.err != nil:
		return 0, c.err
	case c.closing:
		return 0, net.ErrClosed
	}
	c.queue = append(c.queue, p...)
	c.change.Broadcast()
	return len(p), nil
}

// flush writes until the connection ends.
func (c *conn) flush() {
	defer close(c.flushed)
	defer c.Conn.Close()
	var spare []byte
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		for len(c.queue) == 0 && !c.closing && c.err == nil {
			c.change.Wait()
		}
		if len(c.queue) == 0 || c.err != nil {
			if c.late != nil {
				c.late.Stop()
			}
			c.queue = nil // mochi keeps the connection with the session
			return
		}
		writing := c.queue
		c.queue = spare[:0]
		c.change.Broadcast()
		c.mu.Unlock()
		err := write(c.Conn, writing)
		if spare = writing; cap(spare) > 1<<20 {
			spare = nil
		}
		c.mu.Lock()
		if err != nil {
			c.err = err
			c.change.Broadcast()
			return
		}
	}
}

func write(c net.Conn, p []byte) error {
	for len(p) > 0 {
		if err := c.SetWriteDeadline(time.Now().Add(writeLimit)); err != nil {
			return err
		}
		n, err := c.Write(p[:min(len(p), writeChunk)])
		if err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// Close ends reading now, and writing when all is written.
func (c *conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closing {
		c.closing = true
		c.change.Broadcast()
		_ = c.Conn.SetReadDeadline(time.Unix(1, 0))
		c.late = time.AfterFunc(closeLimit, func() { c.Conn.Close() })
	}
	return nil
}

// cut ends everything now.
func (c *conn) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = net.ErrClosed
	}
	c.closing = true
	c.change.Broadcast()
	c.Conn.Close()
}

// mochi's deadline, one and a half keepalives from the last packet, is meant for reads. Once closed, reads stay ended.
func (c *conn) SetDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return net.ErrClosed
	}
	return c.Conn.SetReadDeadline(t)
}

func (c *conn) hold(unlock func()) { c.held = unlock }

func (c *conn) release() {
	if c.held != nil {
		c.held()
		c.held = nil
	}
}
