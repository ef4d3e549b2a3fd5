package thompson

import "math"

// banditMatrix is a symmetric or triangular matrix: the rows of its upper half.
type banditMatrix [banditDim * banditDim]float64

// factor replaces a by U, where UᵀU is a: Cholesky's decomposition. Not ok: a is not positive
// definite.
func (a *banditMatrix) factor() (ok bool) {
	for i := range banditDim {
		for j := i; j < banditDim; j++ {
			sum := a[i*banditDim+j]
			for k := range i {
				sum -= a[k*banditDim+i] * a[k*banditDim+j]
			}
			switch {
			case j > i:
				a[i*banditDim+j] = sum / a[i*banditDim+i]
			case !(sum > 0):
				return false
			default:
				a[i*banditDim+i] = math.Sqrt(sum)
			}
		}
	}
	return true
}

// solve replaces x by U⁻ᵀx, where the matrix is U.
func (a *banditMatrix) solve(x *banditVector) {
	for i := range banditDim {
		for k := range i {
			x[i] -= a[k*banditDim+i] * x[k]
		}
		x[i] /= a[i*banditDim+i]
	}
}

// banditEigen is the eigen-decomposition of A, with raised eigenvalues.
type banditEigen struct {
	values  banditVector
	vectors [banditDim]banditVector // of each value
}

// maxSweeps is the maximum number of sweeps over all pairs. Six or seven are enough.
const maxSweeps = 50

// newBanditEigen returns the eigenvalues of a by Jacobi's rotations. If a is not finite, they are
// NaN.
func newBanditEigen(a *banditMatrix) *banditEigen {
	e, m := &banditEigen{}, [banditDim]banditVector{}
	finite := 0.0 // or NaN
	for i := range banditDim {
		e.vectors[i][i] = 1
		for j := i; j < banditDim; j++ {
			m[i][j], m[j][i] = a[i*banditDim+j], a[i*banditDim+j]
			finite += 0 * m[i][j]
		}
	}
	for range maxSweeps {
		rotated := false
		for p := range banditDim {
			for q := p + 1; q < banditDim; q++ {
				if math.Abs(m[p][q]) > 1e-18*(math.Abs(m[p][p])+math.Abs(m[q][q])) {
					e.rotate(&m, p, q)
					rotated = true
				}
			}
		}
		if !rotated {
			break
		}
	}
	for i := range banditDim {
		e.values[i] = max(m[i][i], banditEigenvalues) + finite
	}
	return e
}

// rotate turns rows and columns p and q of m, and their vectors, so that m[p][q] becomes 0.
func (e *banditEigen) rotate(m *[banditDim]banditVector, p, q int) {
	theta := (m[q][q] - m[p][p]) / (2 * m[p][q])
	tangent := math.Copysign(1/(math.Abs(theta)+math.Hypot(theta, 1)), theta)
	cos := 1 / math.Hypot(tangent, 1)
	sin := tangent * cos
	for k := range banditDim {
		m[k][p], m[k][q] = cos*m[k][p]-sin*m[k][q], sin*m[k][p]+cos*m[k][q]
	}
	for k := range banditDim {
		m[p][k], m[q][k] = cos*m[p][k]-sin*m[q][k], sin*m[p][k]+cos*m[q][k]
		e.vectors[p][k], e.vectors[q][k] = cos*e.vectors[p][k]-sin*e.vectors[q][k], sin*e.vectors[p][k]+cos*e.vectors[q][k]
	}
	m[p][q], m[q][p] = 0, 0
}
