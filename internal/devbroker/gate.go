package devbroker

import (
	"errors"
	"net"
	"sync"
	"time"
)

// gate stands for mochi's listener. mochi sees connections only; when they begin and end is decided here.
type gate struct {
	establish func(net.Conn) // serves a connection to its end

	mu     sync.Mutex
	addr   string
	l      net.Listener // nil while down
	closed bool
	conns  map[*conn]struct{}
	served sync.WaitGroup // accept loop and connections
}

func newGate(addr string, establish func(net.Conn)) *gate {
	return &gate{addr: addr, establish: establish, conns: map[*conn]struct{}{}}
}

func (g *gate) address() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.addr
}

func (g *gate) up() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return net.ErrClosed
	}
	if g.l != nil {
		return nil
	}
	l, err := net.Listen("tcp", g.addr)
	if err != nil {
		return err
	}
	g.l, g.addr = l, l.Addr().String()
	g.served.Go(func() { g.accept(l) })
	return nil
}

func (g *gate) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of file descriptors, say
			<-time.After(50 * time.Millisecond) // then Accept tells whether the gate is closed
			continue
		}
		client := newConn(c)
		g.mu.Lock()
		if g.l != l { // down since a moment
			g.mu.Unlock()
			c.Close()
			return
		}
		g.conns[client] = struct{}{}
		g.served.Go(client.flush)
		g.served.Go(func() { g.serve(client) })
		g.mu.Unlock()
	}
}

func (g *gate) serve(c *conn) {
	g.establish(c)
	c.release()
	c.Close()
	<-c.flushed
	close(c.ended)
	g.mu.Lock()
	delete(g.conns, c)
	g.mu.Unlock()
}

// down returns when the last connection is served. After down(true), up fails.
func (g *gate) down(forever bool) {
	g.mu.Lock()
	g.closed = g.closed || forever
	if g.l != nil {
		g.l.Close()
		g.l = nil
	}
	for c := range g.conns {
		c.cut()
	}
	g.mu.Unlock()
	g.served.Wait()
}
